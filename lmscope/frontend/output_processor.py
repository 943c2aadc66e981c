"""OutputProcessor: the tokens of a step become text for the users who wait for them.

It runs on the engine thread, after each step, so that the five taps fire on one thread in
one order. What it finds out and the scheduler cannot know, a stop string, it gives back as
the ids of requests to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from lmscope.boundary import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestOutput,
)
from lmscope.frontend.detokenizer import IncrementalDetokenizer
from lmscope.frontend.logprobs import LogprobsProcessor
from lmscope.frontend.parallel_sampling import Child
from lmscope.frontend.tokenizer import TokenizerAdapter
from lmscope.tap import Tap

__all__ = ["OutputProcessor", "aborted_output"]


class _RequestState:
    """What the front end knows of one live request."""

    def __init__(
        self,
        request: EngineCoreRequest,
        child: Child,
        tokenizer: TokenizerAdapter | None,
        on_end: Callable[[str], None],
    ) -> None:
        self.child = child
        self.on_end = on_end
        self.num_cached_tokens = 0
        # tapped, and not pushed to the stream yet
        self.on_its_way: RequestOutput | None = None
        self.detokenizer = IncrementalDetokenizer.for_request(tokenizer, request)
        self.logprobs = LogprobsProcessor.for_request(tokenizer, request)

    def deliver(self) -> None:
        """Push what has been tapped; each output once, in the order of the taps."""
        delta, self.on_its_way = self.on_its_way, None
        if delta is not None:
            self.child.stream.push(delta)


class OutputProcessor:
    """Keeps a state per live request and emits one RequestOutput delta per request and step."""

    def __init__(self, tokenizer: TokenizerAdapter | None, tap: Tap) -> None:
        self._tokenizer = tokenizer
        self._tap = tap
        self._states: dict[str, _RequestState] = {}

    def add_request(
        self, request: EngineCoreRequest, child: Child, on_end: Callable[[str], None]
    ) -> None:
        """Expect outputs of `request`; `on_end(request_id)` is called when it has ended."""
        self._states[request.request_id] = _RequestState(request, child, self._tokenizer, on_end)

    def process(self, outputs: EngineCoreOutputs) -> list[str]:
        """Turn one step into text; returns the ids that a stop string has ended.

        Outputs of unknown requests are dropped: they were aborted meanwhile.
        """
        ended = []
        for output in outputs.outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            state.num_cached_tokens = output.num_cached_tokens
            finish_reason, stop_reason = output.finish_reason, output.stop_reason
            stop_string = state.detokenizer.update(
                output.new_token_ids,
                stop_terminated=finish_reason == "stop",
                finished=finish_reason is not None,
            )
            if stop_string is not None:
                if finish_reason is None:
                    ended.append(output.request_id)
                finish_reason, stop_reason = "stop", stop_string
            self._emit(state, output, outputs.step, finish_reason, stop_reason)
        return ended

    def abort_requests(self, children: Iterable[Child], step: int) -> list[str]:
        """End requests with an output of their own; returns the ids that were live."""
        ended = []
        for child in children:
            state = self._states.get(child.request_id)
            # The id may belong to another request by now.
            if state is not None and state.child == child:
                self._emit(state, EngineCoreOutput(child.request_id), step, "abort", None)
                ended.append(child.request_id)
        return ended

    def text_of(self, request_id: str) -> str:
        """The text that has been delivered so far; "" for unknown requests."""
        state = self._states.get(request_id)
        return "" if state is None else state.child.stream.text_of(state.child.index)

    def _emit(
        self,
        state: _RequestState,
        output: EngineCoreOutput,
        step: int,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        is_finished = finish_reason is not None
        prompt_logprobs = None
        logprobs = None
        if output.new_prompt_logprobs_tensors is not None:
            prompt_logprobs = state.logprobs.update_prompt(output.new_prompt_logprobs_tensors)
        if output.new_logprobs is not None:
            logprobs = state.logprobs.update_sample(output.new_logprobs)
        delta = RequestOutput(
            step=step,
            time=time.monotonic(),
            request_id=output.request_id,
            prompt_logprobs=prompt_logprobs,
            outputs=(
                CompletionOutput(
                    state.child.index,
                    state.detokenizer.get_next_output_text(is_finished, delta=True),
                    output.new_token_ids,
                    state.logprobs.cumulative_logprob,
                    logprobs,
                    finish_reason,
                    stop_reason,
                ),
            ),
            finished=is_finished,
            num_cached_tokens=state.num_cached_tokens,
        )
        if is_finished:
            del self._states[output.request_id]
            state.on_end(output.request_id)
        if state.on_its_way is not None:
            # Somebody at a closed gate may end a request while its last output stands there.
            state.deliver()
        if not self._tap.is_live:
            state.child.stream.push(delta)
            return
        state.on_its_way = delta
        # The tap first: who waits for the end and then asks a view must find it there.
        self._tap(delta)
        state.deliver()


def aborted_output(child: Child, step: int) -> RequestOutput:
    """The only output of a request that was aborted before the engine saw it."""
    return RequestOutput(
        step=step,
        time=time.monotonic(),
        request_id=child.request_id,
        outputs=(CompletionOutput(child.index, "", (), finish_reason="abort"),),
        finished=True,
        num_cached_tokens=0,
    )
