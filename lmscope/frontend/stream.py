"""Stream: one request as its user sees it, from any number of threads and coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import NoReturn

from lmscope.boundary import CompletionOutput, Logprob, RequestOutput
from lmscope.sampling_params import RequestOutputKind, SamplingParams

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
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self._abort = abort
        self._check_wait = check_wait
        self._changed = threading.Condition()
        # This request's steps, as they crossed the tap. Only ever appended to.
        self._deltas: list[RequestOutput] = []
        self._num_tokens = 0
        self._finished = False
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], None]] = []

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
    def text(self) -> str:
        """The text so far."""
        return "".join(d.outputs[0].text for d in self._deltas)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far, a stop token included."""
        return tuple(token_id for d in self._deltas for token_id in d.outputs[0].token_ids)

    @property
    def num_tokens(self) -> int:
        """How many `token_ids` there are; costs nothing."""
        return self._num_tokens

    @property
    def output(self) -> RequestOutput:
        """Everything so far."""
        progress = _Progress(self)
        for delta in tuple(self._deltas):
            progress.add(delta)
        return progress.cumulative()

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
        with self._changed:
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
                self._changed.wait(piece)
        return self

    def __iter__(self) -> Iterator[RequestOutput]:
        """RequestOutputs from the first one on, shaped by the parameters' `output_kind`."""
        progress = _Progress(self)
        position = 0
        while True:
            with self._changed:
                while position == len(self._deltas) and not self._finished:
                    self._raise_error()
                    self._check_wait()
                    self._changed.wait(_PIECE_S)
            yield from progress.take(position)
            position = progress.position
            if progress.is_finished:
                return

    def __await__(self) -> Generator[object, None, Stream]:
        return self._wait_async().__await__()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        progress = _Progress(self)
        while not progress.is_finished:
            await self._more_than(progress.position)
            for output in progress.take(progress.position):
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
        """Take in one step. Called on the engine thread."""
        with self._changed:
            self._deltas.append(delta)
            self._num_tokens += len(delta.outputs[0].token_ids)
            self._finished = delta.finished
            self._wake()

    def fail(self, error: BaseException) -> None:
        """End all waiting with `error`. Called on the engine thread."""
        with self._changed:
            if not self._finished:
                self._error = error
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def _raise_error(self) -> None:
        if self._error is not None:
            # A new object each time: several readers must not share one traceback.
            error = type(self._error)(*self._error.args)
            error.__cause__ = self._error.__cause__
            raise error

    async def _wait_async(self) -> Stream:
        while not self._finished:
            await self._more_than(len(self._deltas))
        return self

    async def _more_than(self, position: int) -> None:
        """Return when there are more than `position` deltas, or it is over."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def waker() -> None:
            # A loop that was closed meanwhile has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if len(self._deltas) > position or self._finished:
                return
            self._raise_error()
            self._wakers.append(waker)
        try:
            await event.wait()
        finally:
            with self._changed:
                self._wakers = [w for w in self._wakers if w is not waker]


class _Progress:
    """How far one reader has come, and what it gets next."""

    def __init__(self, stream: Stream) -> None:
        self.position = 0
        self.is_finished = False
        self._stream = stream
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative_logprob: float | None = None
        self._last: RequestOutput | None = None
        self._prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    def take(self, position: int) -> Iterator[RequestOutput]:
        """The outputs that `output_kind` makes of the deltas from `position` on."""
        kind = self._stream.sampling_params.output_kind
        for delta in self._stream._deltas[position:]:
            self.add(delta)
            self.position += 1
            self.is_finished = delta.finished
            if kind is RequestOutputKind.DELTA:
                yield self._complete(delta, delta.outputs)
            elif kind is RequestOutputKind.CUMULATIVE or delta.finished:
                yield self.cumulative()

    def add(self, delta: RequestOutput) -> None:
        self._last = delta
        part = delta.outputs[0]
        self._text.append(part.text)
        self._token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *map(dict, part.logprobs)]
        if part.cumulative_logprob is not None:
            self._cumulative_logprob = part.cumulative_logprob
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = tuple(
                None if entry is None else dict(entry) for entry in delta.prompt_logprobs
            )

    def cumulative(self) -> RequestOutput:
        last = self._last
        if last is None:
            empty = CompletionOutput(0, "", ())
            return self._complete(RequestOutput(request_id=self._stream.request_id), (empty,))
        part = last.outputs[0]
        whole = CompletionOutput(
            part.index,
            "".join(self._text),
            tuple(self._token_ids),
            self._cumulative_logprob,
            None if self._logprobs is None else tuple(self._logprobs),
            part.finish_reason,
            part.stop_reason,
        )
        return self._complete(last, (whole,), self._prompt_logprobs)

    def _complete(
        self,
        delta: RequestOutput,
        outputs: tuple[CompletionOutput, ...],
        prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None,
    ) -> RequestOutput:
        """A caller's output: the delta with the prompt, which the tapped one leaves out."""
        return RequestOutput(
            step=delta.step,
            time=delta.time,
            request_id=delta.request_id,
            prompt=self._stream.prompt,
            prompt_token_ids=self._stream.prompt_token_ids,
            prompt_logprobs=prompt_logprobs or delta.prompt_logprobs,
            outputs=outputs,
            finished=delta.finished,
            num_cached_tokens=delta.num_cached_tokens,
        )
