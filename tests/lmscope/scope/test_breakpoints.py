"""Breakpoints by what happens to a request, over a scripted engine that is short of blocks."""

from __future__ import annotations

import pytest

from lmscope import LLM, SamplingParams, record
from lmscope.boundary import (
    BlockRemoved,
    BlockTouched,
    EngineCoreOutputs,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.scope.breakpoints import EVENTS, break_at, break_on, kind_named
from lmscope.scope.replay import replay

DEADLINE_S = 200


@pytest.fixture(scope="module")
def recording():
    """Two requests that grow beyond the pool, then one that hits and evicts."""

    def script(request_id, position):
        return 97 + position % 26

    with (
        LLM(
            "s",
            execute="scripted",
            script=script,
            block_size=4,
            num_kv_blocks=9,
            max_num_batched_tokens=8,
        ) as llm,
        record(llm) as made,
    ):
        params = SamplingParams(max_tokens=9)
        llm.generate(["abcdefghijkl", "ABCDEFGHIJKL"], params, use_tqdm=False)
        llm.generate("abcdefghijklmnop", params, use_tqdm=False)
    return made


@pytest.fixture
def stops(recording):
    """Where a replay stops: the (kind, step) of each stop until its end."""

    def find(event, request=None):
        with replay(recording) as player:
            made = break_on(player.gate, event, request)
            found = []
            player.play()
            while True:
                wait_until(player, lambda: player.gate.at is not None or player.is_at_end)
                at = player.gate.at
                if at is None:
                    assert made.hits == len(found)
                    return found
                found.append((type(at), at.step))
                player.gate.resume()
                wait_until(player, lambda at=at: player.gate.at is not at)

    return find


def wait_until(player, condition):
    bell = player.gate._bell
    while True:
        with bell.lock:
            if condition():
                return
            ring = bell.listen()
        assert bell.wait(ring, DEADLINE_S)


def expected(recording, kind, test):
    return [(kind, b.step) for b in recording.boundaries if isinstance(b, kind) and test(b)]


def test_stops_where_a_request_is_preempted(recording, stops):
    found = stops("preemption")
    assert found == expected(recording, SchedulerOutput, lambda b: b.preempted_req_ids)
    assert found
    assert stops("preemption", "0") == expected(
        recording, SchedulerOutput, lambda b: "0" in b.preempted_req_ids
    )


def test_stops_where_kept_content_has_to_go(recording, stops):
    def evicts(output):
        return any(isinstance(e, BlockRemoved) and e.for_request_id for e in output.kv_events)

    found = stops("eviction")
    assert found == expected(recording, SchedulerOutput, evicts)
    assert found
    assert stops("eviction", "nobody") == []


def test_stops_at_a_prefix_hit(recording, stops):
    def hits(output):
        return any(isinstance(event, BlockTouched) for event in output.kv_events)

    found = stops("prefix_hit")
    assert found == expected(recording, SchedulerOutput, hits)
    assert found


def test_stops_once_a_request_at_its_first_token(recording, stops):
    first = {}
    for outputs in recording.boundaries:
        if isinstance(outputs, EngineCoreOutputs):
            for output in outputs.outputs:
                if output.new_token_ids:
                    first.setdefault(output.request_id, outputs.step)
    assert len(first) == 3

    assert stops("first_token") == [(EngineCoreOutputs, step) for step in sorted(first.values())]
    assert stops("first_token", "1") == [(EngineCoreOutputs, first["1"])]


def test_stops_where_a_request_ends(recording, stops):
    assert stops("finish") == expected(recording, RequestOutput, lambda b: b.finished)
    assert len(stops("finish", "2")) == 1


def test_an_unknown_event_names_the_nearest(recording):
    with replay(recording) as player:
        with pytest.raises(ValueError, match="did you mean eviction"):
            break_on(player.gate, "evictions")
        with pytest.raises(TypeError, match="it takes the id of a request"):
            break_on(player.gate, "finish", 3)
        assert player.gate.breakpoints == ()


def test_names_say_what_a_breakpoint_stops_at(recording):
    with replay(recording) as player:
        break_at(player.gate, SchedulerOutput)
        break_on(player.gate, "finish", "r:1")
        assert [made.name for made in player.gate.breakpoints] == ["SchedulerOutput", "finish:r:1"]
        assert repr(player.gate.breakpoints[0]) == "<Breakpoint SchedulerOutput: on, hit 0 times>"
    assert set(EVENTS) == {"preemption", "eviction", "prefix_hit", "first_token", "finish"}


@pytest.mark.parametrize("name", ["SchedulerOutput", "scheduleroutput", "scheduler"])
def test_a_struct_is_known_by_a_part_of_its_name(name):
    assert kind_named(name) is SchedulerOutput


@pytest.mark.parametrize("name", ["", "request", "Schduler"])
def test_a_name_of_no_struct_or_of_several_is_refused(name):
    with pytest.raises(ValueError, match="there is no one struct"):
        kind_named(name)
