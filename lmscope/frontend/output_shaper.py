"""OutputShaper: what a caller gets of the deltas that cross the tap.

Three parameters decide: n, of which each sample has deltas of its own; `output_kind`; and the
engine's `stream_interval`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from lmscope.boundary import CompletionOutput, Logprob, RequestOutput
from lmscope.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["OutputShaper"]

_PromptLogprobs = tuple[Mapping[int, Logprob] | None, ...]


class OutputShaper:
    """How far one reader of a stream has come, and what it gets next.

    With DELTA and CUMULATIVE each output has one sample in it, the one that has got further;
    with FINAL_ONLY there is one output, when all samples have ended, with all of them. An
    output is finished when no sample is left.

    position      deltas taken so far
    is_finished   whether all samples have ended
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        sampling_params: SamplingParams,
        stream_interval: int,
    ) -> None:
        self.position = 0
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._kind = sampling_params.output_kind
        self._interval = stream_interval
        self._samples = [_Sample(index) for index in range(sampling_params.n)]
        self._num_left = len(self._samples)
        self._request_id = request_id
        self._last = RequestOutput(request_id=request_id)
        # By sample. Each computes the prompt, so they are equal but for rounding.
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}
        self._are_prompt_logprobs_sent = False

    @property
    def is_finished(self) -> bool:
        return self._num_left == 0

    def take(self, deltas: Sequence[RequestOutput]) -> Iterator[RequestOutput]:
        """The outputs that come of some more deltas."""
        for delta in deltas:
            sample = self.add(delta)
            if self._kind is RequestOutputKind.FINAL_ONLY:
                if self.is_finished:
                    yield self.everything()
            elif sample.is_due(self._interval):
                if self._kind is RequestOutputKind.CUMULATIVE:
                    yield self._complete((sample.whole(),), has_prompt_logprobs=True)
                else:
                    # Once, however many samples there are: deltas are to be added up.
                    is_first = bool(self._prompt_logprobs) and not self._are_prompt_logprobs_sent
                    self._are_prompt_logprobs_sent |= is_first
                    yield self._complete((sample.news(),), has_prompt_logprobs=is_first)

    def add(self, delta: RequestOutput) -> _Sample:
        """Take in one delta; returns the sample that it belongs to."""
        self.position += 1
        self._last = delta
        if delta.finished:
            self._num_left -= 1
        (part,) = delta.outputs
        # Copied, as the log probabilities below: a reader may change what it was given.
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[part.index] = tuple(
                None if entry is None else dict(entry) for entry in delta.prompt_logprobs
            )
        sample = self._samples[part.index]
        sample.add(part)
        return sample

    def everything(self) -> RequestOutput:
        """All that was added, of all samples."""
        outputs = tuple(sample.whole() for sample in self._samples)
        return self._complete(outputs, has_prompt_logprobs=True)

    def _complete(
        self, outputs: tuple[CompletionOutput, ...], has_prompt_logprobs: bool
    ) -> RequestOutput:
        """The last delta with what a tapped one leaves out, under the id that the user knows."""
        last = self._last
        return RequestOutput(
            step=last.step,
            time=last.time,
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._latest_prompt_logprobs() if has_prompt_logprobs else None,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=last.num_cached_tokens,
        )

    def _latest_prompt_logprobs(self) -> _PromptLogprobs | None:
        """Those of the sample that has got further last; if it has none, those of another."""
        known = self._prompt_logprobs
        last = self._last.outputs[0].index if self._last.outputs else 0
        return known.get(last, next(iter(known.values()), None))


class _Sample:
    """One sample, as far as it was added."""

    def __init__(self, index: int) -> None:
        # What is not handed out yet with DELTA, all of it otherwise.
        self._parts: list[CompletionOutput] = [CompletionOutput(index, "", ())]
        self._num_sent = 0
        self._num_waiting = 0

    def add(self, part: CompletionOutput) -> None:
        self._num_waiting += len(part.token_ids)
        if part.logprobs is not None:
            part = msgspec.structs.replace(part, logprobs=tuple(map(dict, part.logprobs)))
        self._parts.append(part)

    def is_due(self, interval: int) -> bool:
        """Whether a caller gets an output now: at the first token, at the end, and in between
        when there are at least `interval` new tokens.
        """
        return (
            interval == 1
            or self._num_sent == 0
            or self._num_waiting >= interval
            or self._parts[-1].finished()
        )

    def news(self) -> CompletionOutput:
        """What was added since the last time."""
        joined = _joined(self._parts)
        self._parts = []
        self._count_as_sent()
        return joined

    def whole(self) -> CompletionOutput:
        """Everything; called again and again it costs one copy each time."""
        joined = _joined(self._parts)
        self._parts = [joined]
        self._count_as_sent()
        return joined

    def _count_as_sent(self) -> None:
        self._num_sent += self._num_waiting
        self._num_waiting = 0


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    """One part that says what some say one after the other; the last one's reasons and sums."""
    last = parts[-1]
    sums = [part.cumulative_logprob for part in parts if part.cumulative_logprob is not None]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return CompletionOutput(
        last.index,
        "".join(part.text for part in parts),
        tuple(chain.from_iterable(part.token_ids for part in parts)),
        sums[-1] if sums else None,
        tuple(chain.from_iterable(logprobs)) if logprobs else None,
        last.finish_reason,
        last.stop_reason,
    )
