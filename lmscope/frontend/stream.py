"""Stream: one request as its user sees it, from any number of threads and coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import NoReturn

from lmscope.boundary import CompletionOutput, RequestOutput
from lmscope.frontend.output_shaper import OutputShaper
from lmscope.frontend.parallel_sampling import child_ids
from lmscope.sampling_params import SamplingParams

__all__ = ["Stream"]

# Waits are cut into pieces so that Ctrl-C gets through on every platform.
_PIECE_S = 0.25


class Stream:
    """One request, from the moment it was submitted.

    Iterate it, await it, or call `wait()`; any number of readers may do so, each from the
    beginning, from any thread. Leaving a for-loop early leaves the request running;
    leaving a with-block aborts it.

        with llm.submit("Tell me a story.") as stream:
            for output in stream:
                print(output.outputs[0].text)

    With n > 1 it is finished when all samples have ended, `outputs` has them by their index,
    and `abort` ends them all. Each output of an iteration has one sample in it, except with
    FINAL_ONLY, which gives all of them once.

    stream_interval   new tokens of a sample that make an output while it runs
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        sampling_params: SamplingParams,
        *,
        abort: Callable[[str], None],
        check_wait: Callable[[], None] = lambda: None,
        stream_interval: int = 1,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self._abort = abort
        self._check_wait = check_wait
        self._stream_interval = stream_interval
        # No condition: Ctrl-C inside one can leave its lock taken, or raise another error.
        self._lock = threading.Lock()
        # The steps of all samples, as they crossed the tap. Only ever appended to.
        self._deltas: list[RequestOutput] = []
        self._num_tokens = 0
        self._num_finished = 0
        self._finished = False
        self._error: BaseException | None = None
        # To be called with the next delta; and of those who wait for the end, with that.
        self._wakers: list[Callable[[], None]] = []
        self._end_wakers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "failed" if self._error else "finished" if self.finished else "running"
        return f"<Stream {self.request_id}: {state}, {self.num_tokens} tokens>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream belongs to a running engine and cannot be pickled or copied")

    # -- so far --------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def num_finished(self) -> int:
        """How many of the n samples have ended."""
        return self._num_finished

    @property
    def child_ids(self) -> tuple[str, ...]:
        """The ids by which views, recordings and `llm.why` know the samples, by their index.

        With n=1 it is `request_id`, else "0_7", "1_7", ... for a `request_id` of "7".
        """
        return child_ids(self.request_id, self.sampling_params.n)

    @property
    def text(self) -> str:
        """The text so far; with n > 1 that of the sample with index 0."""
        return self.text_of(0)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far, a stop token included; with n > 1 those of index 0."""
        return tuple(token_id for part in self._parts_of(0) for token_id in part.token_ids)

    @property
    def num_tokens(self) -> int:
        """How many tokens all samples have so far; costs nothing."""
        return self._num_tokens

    def text_of(self, index: int) -> str:
        """The text so far of one sample."""
        return "".join(part.text for part in self._parts_of(index))

    @property
    def output(self) -> RequestOutput:
        """Everything so far."""
        shaper = self._shaper()
        for delta in tuple(self._deltas):
            shaper.add(delta)
        return shaper.everything()

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """`outputs` of `.output`, so that `stream.wait().outputs[0].text` reads as in vLLM."""
        return self.output.outputs

    # -- waiting -------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> Stream:
        """Wait for the end and return the stream itself.

        TimeoutError after `timeout_s` seconds, the request goes on; EngineDeadError, with
        its cause, when the engine died; GateClosedError when this thread has closed the
        gate at which the engine stands.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._finished:
            self._raise_error()
            self._check_wait()
            piece = _PIECE_S
            if deadline is not None:
                piece = min(piece, deadline - time.monotonic())
                if piece <= 0:
                    raise TimeoutError(
                        f"request {self.request_id} is not finished after {timeout_s} s; "
                        "wait longer, or call abort()"
                    )
            self._wait_for_more(None, piece)
        return self

    def __iter__(self) -> Iterator[RequestOutput]:
        """RequestOutputs from the first one on, shaped by the parameters' `output_kind`."""
        shaper = self._shaper()
        while not shaper.is_finished:
            while shaper.position == len(self._deltas) and not self._finished:
                self._wait_for_more(shaper.position, _PIECE_S)
            yield from shaper.take(self._deltas[shaper.position :])

    def __await__(self) -> Generator[object, None, Stream]:
        return self._wait_async().__await__()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        shaper = self._shaper()
        while not shaper.is_finished:
            await self._more_than(shaper.position)
            for output in shaper.take(self._deltas[shaper.position :]):
                yield output

    def abort(self) -> None:
        """End the request now. Nothing happens when it has ended already."""
        if not self._finished:
            self._abort(self.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    # -- the engine's side -----------------------------------------------------

    def push(self, delta: RequestOutput) -> None:
        """Take in one step of one sample. Called on the engine thread."""
        with self._lock:
            self._deltas.append(delta)
            self._num_tokens += len(delta.outputs[0].token_ids)
            if delta.finished:
                self._num_finished += 1
                self._finished = self._num_finished == self.sampling_params.n
            if self._wakers:
                self._wakers = _called(self._wakers)
            if self._finished:
                self._end_wakers = _called(self._end_wakers)

    def fail(self, error: BaseException) -> None:
        """End all waiting with `error`. Called on the engine thread."""
        with self._lock:
            if not self._finished:
                self._error = error
            self._wakers = _called(self._wakers)
            self._end_wakers = _called(self._end_wakers)

    def _shaper(self) -> OutputShaper:
        return OutputShaper(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            self.sampling_params,
            self._stream_interval,
        )

    def _parts_of(self, index: int) -> Iterator[CompletionOutput]:
        parts = (delta.outputs[0] for delta in self._deltas)
        return (part for part in parts if part.index == index)

    def _raise_error(self) -> None:
        if self._error is not None:
            # A new object each time: several readers must not share one traceback.
            error = type(self._error)(*self._error.args)
            error.__cause__ = self._error.__cause__
            raise error

    def _wait_for_more(self, position: int | None, timeout_s: float) -> None:
        """Return when there are more than `position` deltas, or it is over, or time is up.

        position    None: when it is over only. Waking for each delta takes the engine thread as
                    long as making it
        """
        woken = threading.Lock()
        woken.acquire()
        with self._lock:
            if self._has_more(position):
                return
            self._raise_error()
            self._check_wait()
            self._wakers_of(position).append(woken.release)
        if not woken.acquire(timeout=timeout_s):
            self._forget(position, woken.release)

    async def _wait_async(self) -> Stream:
        while not self._finished:
            await self._more_than(None)
        return self

    async def _more_than(self, position: int | None) -> None:
        """Return when there are more than `position` deltas, or it is over.

        position    None: when it is over only
        """
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def waker() -> None:
            # A loop that was closed meanwhile has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        with self._lock:
            if self._has_more(position):
                return
            self._raise_error()
            self._wakers_of(position).append(waker)
        try:
            await event.wait()
        finally:
            self._forget(position, waker)

    def _has_more(self, position: int | None) -> bool:
        return self._finished or (position is not None and len(self._deltas) > position)

    def _wakers_of(self, position: int | None) -> list[Callable[[], None]]:
        return self._end_wakers if position is None else self._wakers

    def _forget(self, position: int | None, waker: Callable[[], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):  # it may have been called meanwhile
            self._wakers_of(position).remove(waker)


def _called(wakers: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """Call all; returns a list for the next ones."""
    for waker in wakers:
        waker()
    return []
