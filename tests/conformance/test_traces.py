"""The scheduler decides what vLLM 0.16 decides: recorded traces, replayed step by step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import adapter  # noqa: E402
import replay  # noqa: E402

PATHS = replay.find(FOLDER / "traces")


def replay_trace(trace: dict[str, Any]) -> list[str]:
    # Only some traces record the free queue.
    has_queue = any("free_queue" in step.get("schedule", {}) for step in trace["steps"])
    skip = () if has_queue else ("schedule.free_queue",)
    return replay.replay(trace, adapter.make_adapter(trace["config"]), skip=skip)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_trace_replays_exactly(path: Path):
    problems = replay_trace(replay.load(path))

    assert not problems, problems[0]


def test_all_64_traces_are_there():
    kinds = [
        bool(config["async_scheduling"] or config["speculative"])
        for config in (replay.load(path)["config"] for path in PATHS)
    ]

    assert kinds.count(False) == 54
    assert kinds.count(True) == 10


@pytest.mark.parametrize("path", PATHS[::4], ids=lambda path: path.stem)
def test_writing_events_down_changes_no_decision(path: Path):
    trace = replay.load(path)
    made = adapter.make_adapter(trace["config"])
    made.pool.record_events = not made.pool.record_events

    problems = replay.replay(trace, made, skip=("schedule.free_queue", "update.kv_events"))

    assert not problems, problems[0]
