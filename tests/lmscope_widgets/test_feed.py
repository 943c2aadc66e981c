"""From the engine thread to the page: coalesced, bounded, and gone when nobody looks."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from lmscope_widgets import feed as feed_module
from lmscope_widgets.feed import Feed
from lmscope_widgets.protocol import Ack, Command, Ready, Resync
from lmscope_widgets.pump import Pump

from lmscope.boundary import EngineCoreRequest, EngineInfo
from lmscope.errors import EngineClosedError, EngineDeadError
from lmscope.llm import LLM
from lmscope.sampling_params import SamplingParams
from lmscope.tap import Tap

INFO = EngineInfo(
    model="fake",
    block_size=4,
    num_blocks=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
)


class Source:
    """Emits what a test tells it to."""

    def __init__(self) -> None:
        self.tap = Tap(INFO)
        self._count = 0

    def emit(self, count: int = 1) -> None:
        for _ in range(count):
            self._count += 1
            self.tap(
                EngineCoreRequest(
                    request_id=f"r{self._count}",
                    prompt_token_ids=(1, 2, 3),
                    sampling_params=SamplingParams(),
                )
            )


class View:
    """Keeps what it is sent; a page that answers only when told to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.buffers: list[Sequence[Any]] = []
        self.error: Exception | None = None
        self.commands: list[Command] = []

    def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None:
        self.messages.append(message)
        self.buffers.append(buffers)

    def run_command(self, command: Command) -> None:
        if command.op == "refuse":
            raise ValueError("not that one")
        self.commands.append(command)

    def fail(self, error: Exception) -> None:
        self.error = error

    @property
    def kinds(self) -> list[str]:
        return [message["k"] for message in self.messages]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pump(clock: Clock) -> Pump:
    return Pump(clock, thread=False)


@pytest.fixture
def scripted() -> Iterator[Callable[..., LLM]]:
    """Makes engines that say "abcabc..."; closes them."""
    engines: list[LLM] = []

    def make(**options: Any) -> LLM:
        options = {"block_size": 4, "num_kv_blocks": 32, "max_num_batched_tokens": 32} | options
        options.setdefault("max_num_seqs", 4)
        engine = LLM(
            "scripted",
            execute="scripted",
            script=lambda request_id, position: ord("abc"[position % 3]),
            **options,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def open_page(pump: Pump, source: Any, view: View) -> Feed:
    """A view whose page has drawn its first full frame."""
    feed = pump.attach(source, view, 8.0)
    feed.receive(view, Ready())
    pump.tick()
    answer(feed, view)
    return feed


def come_to_rest(engine: LLM) -> None:
    """Wait for the empty step in which an engine forgets what has finished."""
    for _ in range(2):
        engine.tap.follow(lambda boundary: None)[1].close()


def answer(feed: Feed, view: View) -> None:
    feed.receive(view, Ack(view.messages[-1]["seq"]))


def test_a_page_that_is_ready_gets_everything_then_what_changes(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    source.emit(3)
    clock.now = 1.0
    pump.tick()

    assert view.kinds == ["full", "delta"]
    assert [message["seq"] for message in view.messages] == [0, 1]
    assert [row["id"] for row in view.messages[1]["rows"]] == ["r1", "r2", "r3"]
    assert view.messages[1]["phase"] == "live"
    feed.close()


def test_a_thousand_structs_are_one_frame(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    open_page(pump, source, view)
    source.emit(1000)
    clock.now = 1.0
    pump.tick()
    pump.tick()

    assert view.kinds == ["full", "delta"]


def test_messages_are_bounded_by_time_and_not_by_steps(
    pump: Pump, clock: Clock, scripted: Callable[..., LLM]
) -> None:
    engine, view = scripted(), View()
    feed = pump.attach(engine, view, 10.0)
    feed.receive(view, Ready())
    steps = 0
    while steps < 500:
        engine.generate(["x"], SamplingParams(max_tokens=20), use_tqdm=False)
        steps += 20
        clock.now += 0.01  # two thousand steps a second
        pump.tick()
        if view.messages:
            answer(feed, view)

    assert len(view.messages) <= 10 * clock.now + 5


def test_a_slow_page_has_five_frames_on_their_way_and_the_engine_does_not_notice(
    pump: Pump, clock: Clock
) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    for tick in range(1, 10):
        source.emit()
        clock.now = tick / 8
        pump.tick()

    assert view.kinds == ["full", *5 * ["delta"]]

    answer(feed, view)
    clock.now = 1.25
    pump.tick()
    # What it missed comes in one piece.
    assert [row["id"] for row in view.messages[-1]["rows"]] == [f"r{i}" for i in range(6, 10)]


def test_nothing_piles_up_while_no_page_answers(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    feed = pump.attach(source, view, 8.0)
    for tick in range(100):
        source.emit(100)
        clock.now = tick / 8
        pump.tick()

    assert view.messages == []
    assert feed.view.totals.requests == 10_000
    assert len(feed._queue) == 0


def test_the_pump_is_woken_by_the_first_struct_and_not_by_each(pump: Pump) -> None:
    source, view = Source(), View()
    open_page(pump, source, view)
    assert pump.tick() is None
    pump.wake.clear()

    source.emit()
    assert pump.wake.is_set()

    pump.tick()
    pump.wake.clear()
    source.emit(100)
    assert not pump.wake.is_set()


def test_a_live_engine_in_a_long_step_wakes_the_pump_when_it_goes_on(
    pump: Pump, clock: Clock
) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    source.emit()
    clock.now = 1.0
    pump.tick()
    answer(feed, view)
    clock.now = 2.0
    assert pump.tick() == feed_module._FOLD_INTERVAL_S  # only whether it is still alive
    assert feed.phase == "live"
    pump.wake.clear()

    source.emit()

    assert pump.wake.is_set()


def test_the_pump_looks_again_when_the_page_can_take_a_frame(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    source.emit()
    clock.now = 1.0
    wait_s = pump.tick()

    assert wait_s == pytest.approx(1 / 8)

    answer(feed, view)
    clock.now = 1.0 + 1 / 8
    source.emit()
    pump.tick()
    assert view.kinds == ["full", "delta", "delta"]


def test_the_pump_is_woken_when_many_structs_wait(pump: Pump) -> None:
    source, view = Source(), View()
    open_page(pump, source, view)
    source.emit()
    pump.tick()
    pump.wake.clear()
    source.emit(feed_module._FOLD_EARLY)

    assert pump.wake.is_set()


def test_a_feed_that_cannot_keep_up_starts_anew_and_says_so(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    source.emit(feed_module._MOST_QUEUED + 1000)
    assert len(feed._queue) == feed_module._MOST_QUEUED

    clock.now = 1.0
    pump.tick()

    assert view.messages[-1]["k"] == "full"
    assert view.messages[-1]["epoch"] == 1
    assert view.messages[-1]["seq"] == 0
    assert "faster than this view" in view.messages[-1]["note"]

    answer(feed, view)
    source.emit()
    clock.now = 2.0
    pump.tick()
    assert view.messages[-1]["k"] == "delta"
    # The old subscription is gone: one listener, not two.
    assert len(source.tap._subscriptions) == 1


def test_a_feed_that_cannot_start_anew_shows_the_engine_as_dead(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    open_page(pump, source, view)
    source.emit(feed_module._MOST_QUEUED + 1)

    def refuse(function: object) -> None:
        raise EngineClosedError("closed")

    source.tap._run = refuse
    clock.now = 1.0
    pump.tick()

    assert view.messages[-1]["phase"] == "dead"


def test_a_gap_is_answered_with_a_full_frame(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    source.emit()
    clock.now = 1.0
    pump.tick()
    feed.receive(view, Resync())
    clock.now = 2.0
    pump.tick()

    assert view.kinds == ["full", "delta", "full"]
    assert [message["seq"] for message in view.messages] == [0, 1, 2]
    assert [row["id"] for row in view.messages[2]["rows"]] == ["r1"]


def test_a_run_that_has_ended_gets_a_last_full_frame_though_the_page_is_silent(
    pump: Pump, clock: Clock, scripted: Callable[..., LLM]
) -> None:
    engine, view = scripted(), View()
    open_page(pump, engine, view)
    for tick in range(1, 8):
        engine.generate(["hello"], SamplingParams(max_tokens=3), use_tqdm=False)
        come_to_rest(engine)
        clock.now = tick / 8
        pump.tick()
    assert view.kinds == ["full", *5 * ["delta"]]
    wait_s = pump.tick()
    assert wait_s is not None
    clock.now += wait_s
    pump.tick()

    assert view.kinds == ["full", *5 * ["delta"], "full"]
    assert view.messages[-1]["phase"] == "finished"
    assert view.messages[-1]["stat"]["finished"] == 7
    clock.now += 10
    assert pump.tick() is None
    assert len(view.messages) == 7


def test_phases_follow_the_requests(pump: Pump, clock: Clock, scripted: Callable[..., LLM]) -> None:
    engine, view = scripted(), View()
    feed = open_page(pump, engine, view)
    assert feed.phase == "ready"

    engine.generate(["hello"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert feed.is_idle
    assert feed.phase == "finished"


def test_a_closed_gate_is_shown_and_so_is_its_opening(
    pump: Pump, clock: Clock, scripted: Callable[..., LLM]
) -> None:
    engine, view = scripted(), View()
    feed = open_page(pump, engine, view)
    engine.gate.pause()
    stream = engine.submit("hello", SamplingParams(max_tokens=3))
    engine.gate.step()
    clock.now += 1.0
    pump.tick()
    assert view.messages[-1]["phase"] == "paused"
    assert not feed.is_idle

    answer(feed, view)
    engine.gate.resume()
    stream.wait(200)
    come_to_rest(engine)
    clock.now += 1.0
    pump.tick()
    assert view.messages[-1]["phase"] == "finished"


def test_a_pause_without_a_struct_is_shown_at_the_next_look(
    pump: Pump, clock: Clock, scripted: Callable[..., LLM]
) -> None:
    engine, view = scripted(), View()
    feed = open_page(pump, engine, view)
    engine.gate.pause()
    engine.submit("hello", SamplingParams(max_tokens=3))
    engine.gate.step()
    at, engine.gate._at = engine.gate._at, None  # as if the struct had come first
    clock.now += 1.0
    pump.tick()
    assert view.messages[-1]["phase"] == "live"

    answer(feed, view)
    engine.gate._at = at
    wait_s = pump.tick()
    assert wait_s is not None
    clock.now += wait_s
    pump.tick()
    assert view.messages[-1]["phase"] == "paused"
    engine.gate.resume()


def test_an_engine_that_dies_in_a_step_is_shown_as_dead_with_that_step(
    pump: Pump, clock: Clock
) -> None:
    def script(request_id: str, position: int) -> int:
        if position == 2:
            raise RuntimeError("broken")
        return 65

    with LLM("scripted", execute="scripted", script=script, num_kv_blocks=32) as engine:
        view = View()
        feed = open_page(pump, engine, view)
        with pytest.raises(EngineDeadError):
            engine.generate("hello", use_tqdm=False)
        clock.now += 1.0
        pump.tick()

        assert view.messages[-1]["phase"] == "dead"
        assert view.messages[-1]["step"] == 3
        assert feed.is_idle
        feed.close()


def test_what_pages_are_sent_folds_to_what_the_engine_holds(
    pump: Pump, clock: Clock, scripted: Callable[..., LLM]
) -> None:
    engine, view = scripted(num_kv_blocks=14, max_num_batched_tokens=16), View()
    feed = open_page(pump, engine, view)
    columns = [np.frombuffer(b, np.uint8).copy() for b in view.buffers[0]]
    streams = [
        engine.submit(text, SamplingParams(max_tokens=12))
        for text in ("one prompt", "one prompt more", "another", "and a fourth")
    ]
    for stream in streams:
        stream.wait(200)
        clock.now += 1.0
        pump.tick()
        answer(feed, view)
    come_to_rest(engine)
    clock.now += 1.0
    pump.tick()

    for message, buffers in zip(view.messages[1:], view.buffers[1:], strict=True):
        if message["k"] == "full":
            columns = [np.frombuffer(b, np.uint8).copy() for b in buffers]
        else:
            block_ids = np.frombuffer(buffers[0], "<u4")
            for column, changed in zip(columns, buffers[1:], strict=True):
                column[block_ids] = np.frombuffer(changed, np.uint8)
    picture = feed.picture()
    for column, name in zip(columns, ("slot", "state", "ref", "fill"), strict=True):
        assert np.array_equal(column, picture.columns[name]), name
    assert not picture.columns["ref"].any()


def test_two_views_of_one_source_share_one_listener(pump: Pump, clock: Clock) -> None:
    source, first, second = Source(), View(), View()
    feed = open_page(pump, source, first)
    assert open_page(pump, source, second) is feed

    assert len(source.tap._subscriptions) == 1
    source.emit()
    clock.now = 1.0
    pump.tick()
    assert first.kinds == second.kinds == ["full", "delta"]

    feed.detach(first)
    assert feed.is_open
    feed.detach(second)
    assert not feed.is_open
    assert not source.tap.is_live


def test_a_view_that_nobody_holds_is_forgotten(pump: Pump) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    del view
    gc.collect()
    pump.tick()

    assert not feed.is_open
    assert not source.tap.is_live
    assert pump.num_feeds == 0


def test_a_view_that_fails_is_dropped_and_the_others_go_on(pump: Pump, clock: Clock) -> None:
    source, good = Source(), View()

    class Broken(View):
        def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None:
            raise OSError("the socket is gone")

    bad = Broken()
    feed = pump.attach(source, bad, 8.0)
    feed.receive(bad, Ready())
    open_page(pump, source, good)
    source.emit()
    clock.now = 1.0
    pump.tick()

    assert isinstance(bad.error, OSError)
    assert good.kinds == ["full", "delta"]
    assert feed.num_pages == 1


def test_a_source_that_cannot_be_folded_closes_its_feed_and_no_other(
    pump: Pump, clock: Clock
) -> None:
    broken, good = Source(), Source()
    first, second = View(), View()
    feed = open_page(pump, broken, first)
    open_page(pump, good, second)
    feed._queue.append("no boundary")  # type: ignore[arg-type]  # what no engine emits
    good.emit()
    clock.now = 1.0
    pump.tick()

    assert first.error is not None
    assert not broken.tap.is_live
    assert second.kinds == ["full", "delta"]


def test_commands_are_answered_with_their_id(pump: Pump) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    feed.receive(view, Command(1, "rate", 5))
    feed.receive(view, Command(2, "refuse"))
    pump.tick()

    assert view.commands == [Command(1, "rate", 5)]
    assert view.messages[1:] == [
        {"k": "reply", "id": 1, "ok": True, "error": ""},
        {"k": "reply", "id": 2, "ok": False, "error": "not that one"},
    ]


def test_a_flood_of_messages_is_bounded(pump: Pump) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    for number in range(100_000):
        feed.receive(view, Command(number, "x"))
    pump.tick()

    assert len(view.commands) == feed_module._MOST_MESSAGES


def test_threads_are_switched_more_often_only_while_a_view_is_attached(pump: Pump) -> None:
    before = sys.getswitchinterval()
    first, second = Source(), Source()
    one, two = View(), View()
    feed = open_page(pump, first, one)
    other = open_page(pump, second, two)
    assert sys.getswitchinterval() == pytest.approx(0.001)

    feed.close()
    assert sys.getswitchinterval() == pytest.approx(0.001)
    other.close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_fifty_rounds_leave_listeners_feeds_and_threads_as_they_were(clock: Clock) -> None:
    pump = Pump(clock, thread=True)
    source = Source()
    for _ in range(50):
        view = View()
        feed = pump.attach(source, view, 8.0)
        feed.receive(view, Ready())
        feed.detach(view)
    for thread in threading.enumerate():
        if thread.name == "lmscope-pump" and thread is pump._thread:
            thread.join(200)

    assert not source.tap.is_live
    assert source.tap._subscriptions == ()
    assert pump.num_feeds == 0
    assert pump._thread is None


def test_closing_on_another_thread_waits_for_the_pump(pump: Pump, clock: Clock) -> None:
    source, view = Source(), View()
    feed = open_page(pump, source, view)
    source.emit(3)
    apply = feed.view.apply
    closing = threading.Thread(target=feed.close)

    def apply_while_closing(boundary: Any) -> None:
        if closing.ident is None:
            closing.start()
            closing.join(0.2)  # it cannot end before the fold has
        apply(boundary)

    feed.view.apply = apply_while_closing  # type: ignore[method-assign]  # to stop in its midst
    clock.now = 1.0
    pump.tick()
    closing.join(200)

    assert view.error is None
    assert not feed.is_open


def test_the_thread_serves_a_page_by_itself() -> None:
    pump = Pump()
    source, view = Source(), View()
    arrived = threading.Condition()
    keep = view.send_frame

    def send_frame(message: dict[str, Any], buffers: Sequence[Any]) -> None:
        keep(message, buffers)
        feed.receive(view, Ack(message["seq"]))
        with arrived:
            arrived.notify_all()

    view.send_frame = send_frame  # type: ignore[method-assign]  # a page that answers at once
    feed = pump.attach(source, view, 20.0)
    feed.receive(view, Ready())
    with arrived:
        assert arrived.wait_for(lambda: len(view.messages) == 1, 60)
    source.emit()
    with arrived:
        assert arrived.wait_for(lambda: len(view.messages) == 2, 60)
    feed.close()

    assert view.kinds == ["full", "delta"]


def test_the_still_picture_knows_all_steps_and_peaks(
    pump: Pump, scripted: Callable[..., LLM]
) -> None:
    engine, view = scripted(), View()
    feed = open_page(pump, engine, view)
    engine.generate(["a prompt of some length"], SamplingParams(max_tokens=9), use_tqdm=False)

    picture = feed.picture()

    assert sum(bar.prefill for bar in picture.steps) == len("a prompt of some length")
    assert sum(bar.decode for bar in picture.steps) == 8
    (row,) = picture.frame["rows"]
    assert row["most_blocks"] == -(-(23 + 8) // 4)
    assert row["waited"] == 0
    assert picture.plain.startswith("lmscope  step")
