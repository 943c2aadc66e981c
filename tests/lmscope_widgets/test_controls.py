"""What buttons do to an engine and to a replay, as messages from a page; no browser."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from lmscope_widgets.controls import Controls
from lmscope_widgets.feed import Feed
from lmscope_widgets.protocol import Ack, Command, Ready
from lmscope_widgets.pump import Pump

from lmscope.boundary import EngineInfo, RequestOutput, SchedulerOutput
from lmscope.llm import LLM
from lmscope.sampling_params import SamplingParams
from lmscope.scope.recording import Recording, record
from lmscope.scope.replay import Replay
from lmscope.tap import Tap

DEADLINE_S = 200


class Page:
    """A view whose page sends commands and keeps what it gets."""

    def __init__(self, pump: Pump, source: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.pump = pump
        self.feed: Feed = pump.attach(source, self, 8.0)
        self.feed.receive(self, Ready())
        self.tick()

    def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None:
        self.messages.append(message)

    def run_command(self, command: Command) -> None:
        if not self.feed.controls.run(command):
            raise ValueError("no such command")

    def fail(self, error: Exception) -> None:
        raise error

    def tick(self) -> dict[str, Any]:
        """Let the pump work, and answer; returns the newest frame."""
        self.pump.tick()
        frame = self.frames[-1]
        self.feed.receive(self, Ack(frame["seq"], epoch=frame["epoch"]))
        return frame

    def send(self, op: str, arg: Any = None) -> str:
        """Press a button; returns what the reply complains about."""
        self.feed.receive(self, Command(id=len(self.messages), op=op, arg=arg))
        self.tick()
        reply = [m for m in self.messages if m["k"] == "reply"][-1]
        assert reply["ok"] is not bool(reply["error"])
        return str(reply["error"])

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["k"] in ("full", "delta") and m["seq"] >= 0]


@pytest.fixture
def pump() -> Pump:
    # Each look at the clock is a second later, so nothing is too early.
    return Pump(itertools.count(1.0).__next__, thread=False)


@pytest.fixture
def engine() -> Iterator[LLM]:
    with LLM(
        "scripted",
        execute="scripted",
        script=lambda request_id, position: ord("abc"[position % 3]),
        block_size=4,
        num_kv_blocks=32,
    ) as engine:
        yield engine


@pytest.fixture
def recording(engine: LLM) -> Recording:
    with record(engine) as made:
        engine.generate(["hello", "hello you"], SamplingParams(max_tokens=8), use_tqdm=False)
    return made


@pytest.fixture
def player(recording: Recording) -> Iterator[Replay]:
    with Replay(recording) as player:
        yield player


def wait_until(source: Any, condition: Callable[[], bool]) -> None:
    bell = source.gate._bell
    while True:
        with bell.lock:
            if condition():
                return
            ring = bell.listen()
        assert bell.wait(ring, DEADLINE_S)


def at(source: Any) -> str:
    """Wait for the engine to stand; the name of the struct at which it does."""
    wait_until(source, lambda: source.gate.at is not None)
    return type(source.gate.at).__name__


def test_pause_step_and_resume_move_the_real_engine(pump: Pump, engine: LLM) -> None:
    page = Page(pump, engine)
    assert page.send("pause") == ""
    stream = engine.submit("hello", SamplingParams(max_tokens=5))
    assert at(engine) == "EngineCoreRequest"
    assert page.tick()["phase"] == "paused"

    before = engine.gate.at
    assert page.send("step") == ""
    wait_until(engine, lambda: engine.gate.at not in (None, before))
    assert at(engine) == "SchedulerOutput"
    frame = page.tick()
    assert (frame["phase"], frame["boundary"], frame["step"]) == ("paused", "SchedulerOutput", 1)

    assert page.send("step", "RequestOutput") == ""
    wait_until(engine, lambda: isinstance(engine.gate.at, RequestOutput))
    assert page.tick()["boundary"] == "RequestOutput"

    assert page.send("resume") == ""
    assert stream.wait(DEADLINE_S).finished
    assert page.tick()["phase"] == "finished"


def test_a_gate_that_is_closed_over_an_idle_engine_is_paused(pump: Pump, engine: LLM) -> None:
    page = Page(pump, engine)
    assert page.tick()["phase"] == "ready"
    page.send("pause")
    assert page.tick()["phase"] == "paused"
    assert "no request" in page.send("step")
    assert page.tick()["phase"] == "paused"
    page.send("resume")
    assert page.tick()["phase"] == "ready"


def test_the_pump_is_woken_when_the_gate_stops_the_engine(pump: Pump, engine: LLM) -> None:
    page = Page(pump, engine)
    engine.gate.pause()
    pump.wake.clear()
    engine.submit("hello", SamplingParams(max_tokens=5))
    at(engine)
    assert pump.wake.is_set()
    page.feed.close()
    pump.wake.clear()
    engine.gate.resume()
    assert not engine.gate._watchers


def test_breakpoints_are_set_and_taken_away_by_name_and_shown(pump: Pump, engine: LLM) -> None:
    page = Page(pump, engine)
    for name in ("first_token", "finish:1", "SchedulerOutput", "first_token"):
        assert page.send("break", name) == ""
    assert page.tick()["breaks"] == [
        ["first_token", 3, True],
        ["finish:1", 4, True],
        ["SchedulerOutput", 1, True],
    ]
    page.send("unbreak", "SchedulerOutput")
    engine.gate.break_when(RequestOutput, lambda output: False, name="in code")
    assert [made[0] for made in page.tick()["breaks"]] == ["first_token", "finish:1", "in code"]

    stream = engine.submit("hello", SamplingParams(max_tokens=5))
    assert at(engine) == "EngineCoreOutputs"
    for name in ("first_token", "finish:1", "in code"):
        page.send("unbreak", name)
    page.send("resume")
    assert stream.wait(DEADLINE_S).finished
    assert engine.gate.breakpoints == ()


@pytest.mark.parametrize(
    ("op", "arg", "words"),
    [
        ("break", "evictoin", "there is no one struct 'evictoin'"),
        ("break", None, "it takes the name of a struct or event"),
        ("step", "Nothing", "there is no one struct"),
        ("step", 3, "it takes the name of a struct"),
        ("seek", 3, "no such command"),
        ("speed", 3, "no such command"),
        ("gate", None, "no such command"),
        ("run", None, "no such command"),
    ],
)
def test_what_an_engine_does_not_take_is_answered_in_words(
    pump: Pump, engine: LLM, op: str, arg: Any, words: str
) -> None:
    page = Page(pump, engine)
    assert words in page.send(op, arg)
    assert engine.gate.breakpoints == ()


def test_a_page_cannot_fill_the_gate_with_breakpoints(pump: Pump, engine: LLM) -> None:
    page = Page(pump, engine)
    errors = [page.send("break", f"finish:{number}") for number in range(66)]
    assert errors[:64] == [""] * 64
    assert "there are 64 breakpoints" in errors[64]
    assert len(engine.gate.breakpoints) == 64


def test_a_source_without_a_gate_offers_no_buttons() -> None:
    class Source:
        tap = Tap(EngineInfo("fake", 4, 16, 8, 64, 64))

    controls = Controls(Source())
    assert controls.operations == ()
    assert controls.breakpoints == []
    assert not controls.run(Command(id=1, op="pause"))


def test_a_replay_is_played_scrubbed_and_stepped_back(
    pump: Pump, player: Replay, recording: Recording
) -> None:
    page = Page(pump, player)
    assert page.tick()["phase"] == "paused"
    assert page.tick()["step"] == 0

    assert page.send("seek", 5) == ""
    player.follow(lambda item: None)[1].close()  # behind the jump
    frame = page.tick()
    assert (frame["k"], frame["step"], frame["epoch"]) == ("full", 5, 1)
    assert [row["id"] for row in frame["rows"]] == ["0", "1"]
    assert [record[1] for record in frame["log"]] == [0, 1, 2, 3, 4]

    assert page.send("back") == ""
    player.follow(lambda item: None)[1].close()
    assert player.position == recording.count_to(5) - 1
    assert page.tick()["epoch"] == 2

    assert page.send("speed", 1000) == ""
    assert page.tick()["speed"] == 1000.0
    assert page.send("resume") == ""
    player.wait(DEADLINE_S)
    frame = page.tick()
    assert (frame["step"], frame["phase"]) == (recording.steps[-1], "paused")

    # From the end it begins anew.
    started = threading.Event()
    player.tap.on(SchedulerOutput, lambda output: started.set() if output.step == 1 else None)
    page.send("resume")
    assert started.wait(DEADLINE_S)
    player.wait(DEADLINE_S)


def test_a_page_learns_all_steps_of_a_recording_before_it_plays(
    pump: Pump, player: Replay, recording: Recording
) -> None:
    page = Page(pump, player)
    first, second = page.messages[:2]
    steps = [record[1] for record in first["log"]]
    assert (first["seq"], first["step"]) == (-1, recording.steps[-1])
    assert [*steps, first["step"]] == list(recording.steps)
    assert {row["state"] for row in first["rows"]} == {"finished"}
    assert (second["seq"], second["step"], second["epoch"]) == (0, 0, first["epoch"])

    # A page that opens again has forgotten it; a jump does not make it forget.
    page.send("seek", 3)
    assert sum(m.get("seq") == -1 for m in page.messages) == 1
    page.feed.receive(page, Ready())
    page.tick()
    assert sum(m.get("seq") == -1 for m in page.messages) == 2


def test_played_from_a_button_it_is_as_fast_as_it_was(pump: Pump, player: Replay) -> None:
    page = Page(pump, player)
    assert player.speed is None
    page.send("resume")
    assert player.speed == 1.0
    page.send("pause")


def test_of_a_slider_that_moved_only_the_last_place_is_looked_up(
    pump: Pump, player: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(pump, player)
    asked: list[int] = []
    monkeypatch.setattr(player, "ask_to_seek", asked.append)
    for number in range(1, 6):
        page.feed.receive(page, Command(id=number, op="seek", arg=number))
    page.tick()
    assert asked == [5]
    assert [m["ok"] for m in page.messages if m["k"] == "reply"] == [True] * 5


@pytest.mark.parametrize(
    ("op", "arg", "words"),
    [
        ("seek", 9999, "this recording has the steps"),
        ("seek", -1, "this recording has the steps"),
        ("seek", 1.5, "it takes the number of a step"),
        ("seek", True, "it takes the number of a step"),
        ("seek", "3", "it takes the number of a step"),
        ("speed", 0, "must be above 0"),
        ("speed", "fast", "it takes a number"),
    ],
)
def test_what_a_replay_does_not_take_is_answered_in_words(
    pump: Pump, player: Replay, op: str, arg: Any, words: str
) -> None:
    page = Page(pump, player)
    assert words in page.send(op, arg)
    assert player.position == 0


def test_beyond_the_end_of_a_recording_there_is_no_step(pump: Pump, player: Replay) -> None:
    page = Page(pump, player)
    player.play().wait(DEADLINE_S)
    assert "the recording ends here" in page.send("step")
    assert page.send("back") == ""
    player.follow(lambda item: None)[1].close()
    assert page.send("step") == ""


def test_fifty_pages_of_a_replay_leave_nothing_behind(pump: Pump, player: Replay) -> None:
    watchers = len(player.gate._watchers)
    for _ in range(50):
        page = Page(pump, player)
        page.send("break", "finish")
        page.send("unbreak", "finish")
        page.feed.close()
    player.follow(lambda item: None)[1].close()

    assert len(player.gate._watchers) == watchers
    assert len(player._followers) == 1
    assert not player.tap._subscriptions
    assert pump.num_feeds == 0


def test_a_replay_that_was_closed_says_so(pump: Pump, player: Replay) -> None:
    page = Page(pump, player)
    player.close()
    assert "was closed" in page.send("seek", 1)
