"""The log of steps stays bounded and loses nothing that is a sum."""

from __future__ import annotations

from lmscope_widgets.step_log import StepBar, StepLog


def test_keeps_each_step_while_there_is_room() -> None:
    log = StepLog(limit=8)
    for step in range(1, 9):
        log.put(StepBar(step=step, decode=step))

    assert [(bar.step, bar.count, bar.decode) for bar in log.bars] == [
        (step, 1, step) for step in range(1, 9)
    ]


def test_joins_neighbours_when_it_is_full_and_covers_the_whole_run() -> None:
    log = StepLog(limit=8)
    for step in range(1, 1001):
        log.put(StepBar(step=step, decode=1, evicted=2, used=step, waiting=step % 3))

    assert len(log.bars) <= 8
    assert log.bars[0].step == 1
    assert sum(bar.count for bar in log.bars) == 1000
    assert sum(bar.decode for bar in log.bars) == 1000
    assert sum(bar.evicted for bar in log.bars) == 2000
    assert max(bar.used for bar in log.bars) == 1000
    assert {bar.waiting for bar in log.bars} == {2}
    assert [bar.step for bar in log.bars] == sorted(bar.step for bar in log.bars)
