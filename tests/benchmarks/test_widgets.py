"""The arithmetic of the benchmark of live dashboards."""

from __future__ import annotations

import pytest

import widgets


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]

    assert widgets.percentile(values, 95) == 95
    assert widgets.percentile(values, 100) == 100
    assert widgets.percentile([7.0], 95) == 7
    assert widgets.percentile([1.0, 2.0], 50) == 1


def test_a_goal_is_a_most_or_a_least() -> None:
    assert widgets.Goal("a", 100, 100).is_met
    assert not widgets.Goal("a", 101, 100).is_met
    assert widgets.Goal("a", 0.92, 0.92, is_most=False).is_met
    assert not widgets.Goal("a", 0.91, 0.92, is_most=False).is_met
    met, missed = widgets.verdict([widgets.Goal("a", 1, 2), widgets.Goal("b", 1, 2, False)])
    assert (met, missed) == (
        "a: met, 1.000, the goal is at most 2",
        "b: MISSED, 1.000, the goal is at least 2",
    )


def sent(seq: int, step: int, made_at_s: float) -> tuple[object, ...]:
    return seq, 0, step, "delta", 10, 10, made_at_s, False, 0.001


def test_a_step_counts_from_its_end_to_the_first_drawn_frame_that_shows_it() -> None:
    steps = [(1, 1.0), (2, 1.1), (3, 1.2), (4, 1.3)]
    frames = [sent(0, 1, 1.05), sent(1, 2, 1.15), sent(2, 3, 1.25), sent(3, 4, 1.35)]
    # Frame 1 was never drawn: the step that it would have shown waited for frame 2.
    shown = [(0, 1100), (2, 1290), (3, 1400)]

    newest, every = widgets.drawn_after(steps, frames, shown)

    # What ended before the first drawn frame has no beginning, so it does not count.
    assert every == pytest.approx([190, 90, 100])
    assert newest == pytest.approx([90, 100])


def test_a_frame_in_the_middle_of_a_step_shows_the_one_before_as_ended() -> None:
    steps = [(1, 1.0), (2, 1.1), (3, 1.2)]
    frames = [sent(0, 1, 1.05), sent(1, 3, 1.15)]

    newest, every = widgets.drawn_after(steps, frames, [(0, 1100), (1, 1180)])

    assert newest == every == pytest.approx([80])


def test_every_pause_must_have_reached_the_kernel() -> None:
    clicks = [1000.0, 1500.0, 2000.0, 2500.0]
    stamps = {"received": [1.01, 1.51, 2.02, 2.52], "asked": [1.02, 2.03], "stood": [1.05, 2.06]}

    times = widgets._click_times("here", clicks, stamps)

    assert times["ms, click to command in the kernel, here"] == pytest.approx([10, 20])
    assert times["ms, click to gate told, here"] == pytest.approx([20, 30])
    assert times["ms, click to standing engine, here"] == pytest.approx([50, 60])
    with pytest.raises(RuntimeError, match="4 clicks"):
        widgets._click_times("here", clicks, stamps | {"stood": [1.05]})


def test_a_table_has_spread_and_tail_and_leaves_out_what_was_not_measured() -> None:
    lines = widgets.table({"ms": [1.0, 2.0, 3.0, 400.0], "nothing": []})

    assert lines[2:] == ["| ms | 4 | 2.500 | 1.750 to 102 | 400 | 400 |"]
