"""Replay: a recording behind a tap and a gate; no torch."""

from __future__ import annotations

import threading

import pytest

from lmscope import LLM, SamplingParams, record
from lmscope.boundary import BOUNDARIES, RequestOutput, SchedulerOutput
from lmscope.errors import EngineClosedError, GateClosedError, NothingToRun, RecordingError
from lmscope.scope.replay import Replay, replay
from lmscope.scope.view import EngineView, differences

DEADLINE_S = 200


@pytest.fixture(scope="module")
def recording():
    def script(request_id, position):
        return 97 + position % 26

    with (
        LLM("s", execute="scripted", script=script, block_size=4, num_kv_blocks=9) as llm,
        record(llm) as made,
    ):
        llm.generate(
            ["abcdefgh", "abcdefghij", "xyz"], SamplingParams(max_tokens=9), use_tqdm=False
        )
    return made


@pytest.fixture
def player(recording):
    with replay(recording) as made:
        yield made


def listen(player: Replay) -> list:
    seen = []
    for kind in BOUNDARIES:
        player.tap.on(kind, seen.append)
    return seen


def test_plays_every_struct_in_order(recording, player):
    seen = listen(player)

    assert player.play().wait(DEADLINE_S) is player

    assert seen == list(recording.boundaries)
    assert player.position == len(recording)


def test_nothing_moves_before_it_is_told_to(player):
    seen = listen(player)
    assert player.gate.pause() is None
    assert (seen, player.position) == ([], 0)


def test_steps_one_struct_at_a_time_or_to_a_kind(recording, player):
    structs = list(recording.boundaries)
    assert [player.gate.step() for _ in range(3)] == structs[:3]
    output = player.gate.step(RequestOutput)
    assert output == next(b for b in structs if isinstance(b, RequestOutput))


def test_stepping_beyond_the_end_says_so(recording, player):
    for _ in recording.boundaries:
        player.gate.step()
    with pytest.raises(NothingToRun):
        player.gate.step()


def test_a_breakpoint_stops_it(recording, player):
    player.gate.break_when(SchedulerOutput, lambda b: b.step == 4, once=True)
    player.play()
    for _ in range(DEADLINE_S * 100):
        if player.gate.at is not None:
            break
        threading.Event().wait(0.01)
    assert player.gate.at.step == 4
    player.gate.resume()
    player.wait(DEADLINE_S)
    assert player.position == len(recording)


@pytest.mark.parametrize("stop", [0, 1, 7, 23])
def test_who_joins_in_the_middle_sees_the_same_end(recording, player, stop):
    for _ in range(stop):
        player.gate.step()
    seen = []
    snapshot, _ = player.tap.follow(seen.append)
    view = EngineView(snapshot)
    player.play().wait(DEADLINE_S)

    for boundary in seen:
        view.apply(boundary)

    assert seen == list(recording.boundaries)[stop:]
    assert differences(view, recording.at().snapshot()) == []


def test_it_can_be_recorded_again(recording, player):
    with record(player) as second:
        player.play().wait(DEADLINE_S)
    assert list(second.boundaries) == list(recording.boundaries)


def test_waiting_behind_ones_own_gate_raises(player):
    player.gate.step()
    with pytest.raises(GateClosedError):
        player.wait()


def test_a_strict_listener_ends_it_and_its_error_is_raised(player):
    player.tap.on(SchedulerOutput, lambda b: 1 / 0, strict=True)
    player.play()
    with pytest.raises(ZeroDivisionError):
        player.wait(DEADLINE_S)


def test_it_keeps_the_pace_of_the_recording(recording):
    paces = []
    with Replay(recording, speed=1e9) as player:
        player._keep_pace = lambda boundary: paces.append(boundary.time)
        player.play().wait(DEADLINE_S)
    assert len(paces) == len(recording)
    for bad in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            replay(recording, speed=bad)


def test_opens_files_and_closes_twice(recording, tmp_path):
    recording.save(tmp_path / "run.lmscope")
    player = replay(tmp_path / "run.lmscope", speed=1e6)
    player.play().wait(DEADLINE_S)
    player.close()
    player.close()
    with pytest.raises(EngineClosedError):
        player.tap.follow(print)


def test_jumps_to_the_end_of_a_step_and_plays_on_from_there(recording, player):
    seen = listen(player)
    assert player.seek(4) is player
    assert player.step == 4
    assert seen == []
    assert not player.is_playing

    player.play().wait(DEADLINE_S)

    assert seen == [boundary for boundary in recording.boundaries if boundary.step > 4]
    assert player.is_at_end
    player.seek(2)
    assert (player.step, player.is_playing, len(seen)) == (2, False, len(seen))


def test_a_jump_moves_the_struct_under_the_cursor(recording, player):
    structs = list(recording.boundaries)
    player.gate.step()
    player.seek(4)
    count = recording.count_to(4)
    assert player.gate.at == structs[count - 1]
    assert player.position == count

    assert player.gate.step() == structs[count]
    player.back()
    assert player.gate.at == structs[count - 1]
    player.back()
    assert player.gate.at == structs[count - 2]
    assert player.gate.step() == structs[count - 1]


def test_jumping_back_to_the_start_begins_anew(recording, player):
    structs = list(recording.boundaries)
    for _ in range(3):
        player.gate.step()
    player.seek(recording.steps[0])
    while player.position:
        player.back()
    assert player.gate.at is None
    player.back()
    assert player.gate.step() == structs[0]


def test_a_follower_gets_the_whole_view_and_a_new_one_at_each_jump(recording, player):
    for _ in range(7):
        player.gate.step()
    got = []
    view, subscription = player.follow(got.append)
    assert differences(view, recording.after(7).snapshot()) == []

    player.gate.step()
    player.seek(5)
    player.gate.step()
    subscription.close()
    player.seek(6)

    count = recording.count_to(5)
    assert [type(item) for item in got] == [
        type(recording.boundaries[7]),
        EngineView,
        type(recording.boundaries[count]),
    ]
    assert differences(got[1], recording.at(5).snapshot()) == []
    assert got[1].requests.keys() == recording.at(5).requests.keys()


def test_a_step_that_was_not_recorded_is_refused_before_anything_moves(recording, player):
    player.gate.step()
    at = player.gate.at
    for ask in (player.seek, player.ask_to_seek):
        with pytest.raises(RecordingError, match="step is 9999; this recording has the steps 0"):
            ask(9999)
        with pytest.raises(TypeError, match="takes an integer"):
            ask("3")
    assert player.gate.at is at


def test_a_wait_for_the_next_struct_ends_when_told_otherwise(recording, player):
    """At this speed the whole recording would take days."""
    player.play(speed=1e-9)
    player.seek(recording.steps[-1] - 1)
    assert player.step == recording.steps[-1] - 1
    player.speed = None
    assert player.wait(DEADLINE_S).is_at_end

    player.seek(2)
    player.play(speed=1e-9)
    assert player.is_playing
    assert player.gate.pause() is not None
    assert not player.is_playing


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_speed_that_does_not_move_is_refused(player, speed):
    with pytest.raises(ValueError, match="must be above 0"):
        player.speed = speed
    assert player.speed is None


def test_the_cursor_can_be_moved_after_the_end_and_by_those_who_do_not_wait(recording, player):
    player.play().wait(DEADLINE_S)
    player.ask_to_seek(3)
    player.ask_to_step_back()
    player.follow(lambda item: None)[1].close()  # behind what was asked for
    assert player.position == recording.count_to(3) - 1
    player.close()
    with pytest.raises(EngineClosedError):
        player.seek(3)
