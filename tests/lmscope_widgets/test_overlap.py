"""A live view of an engine whose steps overlap: the device runs while the view is drawn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from lmscope_widgets.base import LiveView
from lmscope_widgets.protocol import Ack, Ready
from lmscope_widgets.pump import Pump

from lmscope.boundary import EngineCoreOutputs, EngineCoreRequest, ModelRunnerOutput
from lmscope.llm import LLM
from lmscope.sampling_params import SamplingParams

DEADLINE_S = 200
IN_FLIGHT = "Step {} is in flight: the device has run it, and its tokens are taken in when"


class Page:
    """Keeps what it gets, and puts the rows together as a page does."""

    def __init__(self, pump: Pump, source: Any) -> None:
        self.frames: list[dict[str, Any]] = []
        self.texts: dict[str, str] = {}
        self._pump = pump
        self.feed = pump.attach(source, self, 8.0)
        self.feed.receive(self, Ready())

    def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None:
        self.frames.append(message)
        if message["k"] == "full":
            self.texts = {}
        for row in message["rows"]:
            before = self.texts.get(row["id"], "")
            self.texts[row["id"]] = row.get("text", before + row.get("add", ""))

    def fail(self, error: Exception) -> None:
        raise error

    def run_command(self, command: Any) -> None:
        raise AssertionError("nobody presses a button")

    def tick(self) -> dict[str, Any]:
        """Let the pump send what is due, and answer it; returns the newest frame."""
        self._pump.tick()
        frame = self.frames[-1]
        self.feed.receive(self, Ack(frame["seq"], epoch=frame["epoch"]))
        return frame


@pytest.fixture
def pump() -> Pump:
    # Each look at the clock is a second later, so nothing is too early.
    return Pump(itertools.count(1.0).__next__, thread=False)


def letters(request_id: str, position: int) -> int:
    return 97 + (position * 7 + int(request_id)) % 26


def make(script: Callable[[str, int], int] = letters, **options: Any) -> LLM:
    settings = {"block_size": 4, "num_kv_blocks": 12, "max_num_batched_tokens": 16} | options
    settings.setdefault("max_num_seqs", 4)
    return LLM("s", execute="scripted", script=script, async_scheduling=True, **settings)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(DEADLINE_S * 1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


def test_frames_keep_their_order_and_end_with_the_tokens_of_the_outputs(pump: Pump) -> None:
    """With preemptions: the pool holds half of what the requests come to."""
    with make() as llm:
        page = Page(pump, llm)
        llm.gate.pause()
        streams = [
            llm.submit(prompt, SamplingParams(max_tokens=14)) for prompt in ("abc", "defgh", "ij")
        ]
        # Frame by frame while the engine goes from struct to struct, one step ahead.
        for _ in range(40):
            llm.gate.step()
            page.tick()
        llm.gate.resume()
        for stream in streams:
            stream.wait(DEADLINE_S)
        wait_until(llm._loop.is_idle)
        page.tick()
        page.tick()
        view = page.feed.view

    drawn = [frame for frame in page.frames if frame["k"] in ("full", "delta")]
    assert len(drawn) > 40
    assert [frame["seq"] for frame in drawn] == list(range(len(drawn)))
    steps = [frame["step"] for frame in drawn]
    assert steps == sorted(steps)
    assert [frame["time"] for frame in drawn] == sorted(frame["time"] for frame in drawn)
    tokens = [frame["stat"]["output_tokens"] for frame in drawn]
    assert tokens == sorted(tokens)
    assert tokens[-1] == sum(len(stream.token_ids) for stream in streams) == 42
    assert drawn[-1]["stat"]["preemptions"] > 0
    assert page.texts == {stream.request_id: stream.text for stream in streams}
    for stream in streams:
        assert tuple(view.requests[stream.request_id].output_token_ids) == stream.token_ids


def test_a_gate_that_closes_drains_the_device_and_every_view_says_so(pump: Pump) -> None:
    ran: list[int] = []

    def script(request_id: str, position: int) -> int:
        ran.append(position)
        return 97 + position

    with make(script) as llm:
        page, widget = Page(pump, llm), LiveView(llm, pump=pump)
        llm.gate.pause()
        llm.submit("abc", SamplingParams(max_tokens=9))
        llm.gate.step(EngineCoreRequest)
        assert "in_flight" not in page.tick()

        assert llm.gate.step(EngineCoreOutputs).step == 1
        frame = page.tick()
        # Step 2 is not taken in, and its token has been sampled all the same.
        assert llm.gate.in_flight == (2,)
        assert ran == [0, 1]
        assert frame["phase"] == "paused"
        assert frame["in_flight"].startswith(IN_FLIGHT.format(2))
        assert repr(llm.gate) == (
            "<Gate: stands at EngineCoreOutputs of step 1, step 2 in flight, 0 breakpoints>"
        )
        data, _ = widget._repr_mimebundle_()
        for words in (data["text/html"], " ".join(data["text/plain"].split())):
            assert IN_FLIGHT.format(2) in words

        assert llm.gate.step(ModelRunnerOutput).step == 2
        assert page.tick()["in_flight"].startswith(IN_FLIGHT.format(3))
        llm.gate.resume()
        wait_until(llm._loop.is_idle)
        frame = page.tick()
        assert frame["phase"] == "finished"
        assert "in_flight" not in frame
        assert "running" in repr(llm.gate)
        widget.close()


def test_a_request_that_enters_beside_a_batch_in_flight_does_not_hide_it(pump: Pump) -> None:
    with make() as llm:
        page = Page(pump, llm)
        llm.gate.pause()
        llm.submit("abc", SamplingParams(max_tokens=9))
        llm.gate.step(EngineCoreOutputs)
        llm.submit("de", SamplingParams(max_tokens=2))
        at = llm.gate.step(EngineCoreRequest)

        assert (at.request_id, at.step) == ("1", 2), "the last step that was begun"
        assert llm.gate.in_flight == (2,)
        assert page.tick()["in_flight"].startswith(IN_FLIGHT.format(2))
        llm.gate.resume()
