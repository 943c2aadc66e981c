"""Tap: typed subscriptions, listeners that fail, and joining late."""

from __future__ import annotations

import logging

import pytest

from lmscope.boundary import (
    EngineCoreOutputs,
    EngineInfo,
    ModelRunnerOutput,
    SchedulerOutput,
    decode,
    encode,
)
from lmscope.tap import Tap

INFO = EngineInfo("m", 4, 10, 8, 64, 100)


def test_a_listener_gets_exactly_the_kind_it_asked_for():
    tap, seen = Tap(INFO), []
    with tap.on(SchedulerOutput, seen.append):
        tap(SchedulerOutput(step=1))
        tap(ModelRunnerOutput(step=1))
    tap(SchedulerOutput(step=2))

    assert [(type(b), b.step) for b in seen] == [(SchedulerOutput, 1)]


def test_nothing_is_live_without_listeners():
    tap = Tap(INFO)
    assert not tap.is_live
    subscription = tap.on(SchedulerOutput, print)
    assert tap.is_live
    subscription.close()
    subscription.close()
    assert not tap.is_live


def test_a_listener_that_raises_is_dropped_and_shown_once(caplog):
    tap, seen = Tap(INFO), []
    bad = tap.on(SchedulerOutput, lambda boundary: 1 / 0)
    tap.on(SchedulerOutput, seen.append)

    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            tap(SchedulerOutput(step=step))

    assert len(seen) == 2
    assert isinstance(bad.error, ZeroDivisionError)
    assert not bad.is_open
    assert len(caplog.records) == 1
    assert "step 1" in caplog.text


def test_strict_raises_in_the_engine():
    tap = Tap(INFO)
    tap.on(SchedulerOutput, lambda boundary: 1 / 0, strict=True)
    with pytest.raises(ZeroDivisionError):
        tap(SchedulerOutput(step=1))


def test_only_boundary_structs_can_be_subscribed_to():
    with pytest.raises(TypeError, match="SchedulerOutput"):
        Tap(INFO).on(dict, print)


def test_a_follower_of_a_fresh_engine_starts_with_all_blocks_free():
    snapshot, _ = Tap(INFO).follow(print)
    assert snapshot.free_queue == tuple(range(1, 10))


def test_every_struct_survives_its_encoding():
    structs = (SchedulerOutput(step=3), ModelRunnerOutput(req_ids=("a",)), EngineCoreOutputs())
    for boundary in structs:
        assert decode(encode(boundary)) == boundary
