"""Attention in a still picture: how dark each block is, and what the darkest stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lmscope.scope.attention_words import percent
from lmscope_widgets.palette import light
from lmscope_widgets.still_map import Bytes

__all__ = ["grounds", "top_words"]

_MOST_LEVEL = 255


def grounds(frame: Mapping[str, Any], num_blocks: int) -> Bytes | None:
    """For each block the number of its ground, from 1, and 0 for next to no attention.

    None where nobody measured it. As in the page, they go with the square root of the share.
    """
    mass = frame.get("mass")
    if not mass:
        return None
    levels = np.zeros(num_blocks)
    levels[mass["of"][::2]] = mass["of"][1::2]
    last = len(light().attention) - 1
    places = 1 + np.floor(last * np.sqrt(levels / _MOST_LEVEL) + 0.5)
    return np.where(levels > 0, places, 0).astype(np.uint8)


def top_words(frame: Mapping[str, Any]) -> str:
    """What the darkest ground stands for."""
    return percent(float(frame["mass"]["top"]))
