"""A short soak: what a thousand requests leave behind. `make soak` runs more, and weighs it."""

from __future__ import annotations

import ipywidgets.widgets.widget as models
import soak
from lmscope_widgets.pump import default_pump


def test_a_thousand_requests_leave_no_model_and_no_listener() -> None:
    before = len(models._instances)
    feeds = default_pump().num_feeds

    first, last = soak.soak(1000, 300)

    assert (first.requests, last.requests) == (300, 1000)
    # the views and their layouts, and one listener for both
    assert (last.models - before, last.listeners) == (4, 1)
    assert (first.models, first.listeners) == (last.models, last.listeners)
    assert last.frames > first.frames > 0
    assert len(models._instances) == before
    assert default_pump().num_feeds == feeds
