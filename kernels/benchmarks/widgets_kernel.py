"""What the cells of a measured notebook call: engines, and stamps of what reaches the kernel.

Times are seconds of the wall clock, which the browser on the same machine reads as well.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from workloads import make_encoder, make_workload

from lmscope import LLM, SamplingParams, watch
from lmscope.boundary import Boundary, EngineCoreOutputs

__all__ = ["Stamps", "Talk", "demo_engine", "generate", "print_json", "scripted_engine"]

_TEXT = "Because air scatters light of short waves more than light of long ones, skies are blue. "


def demo_engine(**options: Any) -> LLM:
    """The demo model on one torch thread."""
    return LLM("demo", threads=1, **options)


def scripted_engine(num_blocks: int, num_requests: int, step_s: float) -> LLM:
    """A script in the place of the model; each step takes `step_s` beside its own work."""
    told: set[str] = set()

    def say(request_id: str, position: int) -> int:
        if request_id in told:
            # It is asked for again, so a step has begun: the time that a model would take,
            # without the interpreter's lock.
            told.clear()
            time.sleep(step_s)
        told.add(request_id)
        return ord(_TEXT[position % len(_TEXT)])

    return LLM(
        "scripted",
        execute="scripted",
        script=say,
        num_kv_blocks=num_blocks,
        max_num_seqs=max(64, num_requests),
        max_num_batched_tokens=2048,
    )


class Talk:
    """Keeps an engine generating until it is closed, by asking again whenever one has finished."""

    def __init__(self, llm: LLM, num_requests: int, max_tokens: int) -> None:
        self._llm = llm
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(num_requests)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        count = 0
        while not self._is_over.is_set():
            prompt = f"You are a patient tutor. Answer question {number}, for the {count}th time."
            stream = self._llm.submit(prompt, self._params)
            while not stream.finished and not self._is_over.wait(0.05):
                pass
            if not stream.finished:
                stream.abort()
            count += 1


class Stamps:
    """When what crossed, for one dashboard.

    received   a command came into the kernel, on whatever thread
    asked      the gate was told to pause
    stood      the engine stands at the gate
    moved      the gate let the engine go on
    steps      of each step: its number and when its last struct left the engine
    sent       of each frame: seq, epoch, step, kind, bytes of the header, bytes of all buffers,
               when it was handed over, is it told in bins, and seconds it took to hand it over
    """

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.received: list[float] = []
        self.asked: list[float] = []
        self.stood: list[float] = []
        self.moved: list[float] = []
        self.steps: list[tuple[int, float]] = []
        self.sent: list[tuple[Any, ...]] = []
        self.llm = llm
        self._was_at: Boundary | None = None
        self.view = watch(llm, **options)
        self._instrument()

    def close(self) -> None:
        self._following.close()
        self.llm.gate.unwatch(self._look)
        self.view.close()

    def clear(self) -> None:
        """Forget what was stamped so far."""
        for each in (self.received, self.asked, self.stood, self.moved, self.steps, self.sent):
            each.clear()

    def as_json(self) -> dict[str, Any]:
        names = ("received", "asked", "stood", "moved", "steps", "sent")
        return {name: getattr(self, name) for name in names}

    def _instrument(self) -> None:
        # A view is an untyped widget, and what it has for the page is replaced here.
        gate, view = self.llm.gate, cast(Any, self.view)
        ask_to_pause, send_frame, send = gate.ask_to_pause, view.send_frame, view.send
        receive = view._feed.receive

        def stamped_ask() -> None:
            self.asked.append(time.time())
            ask_to_pause()

        def stamped_receive(of: Any, message: Any) -> None:
            if type(message).__name__ == "Command":
                self.received.append(time.time())
            receive(of, message)

        def stamped_frame(message: dict[str, Any], buffers: Sequence[Any]) -> None:
            if message["k"] not in ("full", "delta"):
                send_frame(message, buffers)
                return
            sizes: list[int] = []

            def sized(content: Any, buffers: list[Any]) -> None:
                header = len(json.dumps(content, ensure_ascii=False).encode())
                sizes.extend((header, sum(len(memoryview(part).cast("B")) for part in buffers)))
                send(content, buffers=buffers)

            view.send = sized
            began, at = time.perf_counter(), time.time()
            send_frame(message, buffers)
            took = time.perf_counter() - began
            names = ("seq", "epoch", "step", "k")
            self.sent.append((*(message[n] for n in names), *sizes, at, "bin" in message, took))

        gate.ask_to_pause = stamped_ask  # type: ignore[method-assign]  # the button calls it
        view._feed.receive = stamped_receive
        view.send_frame = stamped_frame
        gate.watch(self._look)
        self._following = self.llm.tap.on(
            EngineCoreOutputs, lambda one: self.steps.append((one.step, time.time()))
        )

    def _look(self) -> None:
        at = self.llm.gate.at
        if at is not None and self._was_at is None:
            self.stood.append(time.time())
        elif at is None and self._was_at is not None:
            self.moved.append(time.time())
        self._was_at = at


def generate(llm: LLM, workload: str, num_output_tokens: int) -> dict[str, float]:
    """Generate once, from no cached prefix: wall and CPU time, and tokens."""
    prompts = make_workload(workload, make_encoder(str(llm.model))).prompts
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be reset")
    engine_cpu = llm._loop.call(lambda core: time.thread_time())
    process_cpu, began = time.process_time(), time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    wall_s = time.perf_counter() - began
    process_cpu = time.process_time() - process_cpu
    engine_cpu = llm._loop.call(lambda core: time.thread_time()) - engine_cpu
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "engine_cpu_s": engine_cpu,
        "process_cpu_s": process_cpu,
        "tokens": tokens,
    }


def print_json(value: Any) -> None:
    """For the driver, which reads what a cell has printed."""
    print(json.dumps(value))
