"""Redactor: the structs of a recording without what was said in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TypeVar

import msgspec

from lmscope.boundary import (
    AnyBoundary,
    BlockRemoved,
    BlockStored,
    CompletionOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVEvent,
    Logprob,
    LogprobsLists,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.sampling_params import SamplingParams

__all__ = ["Redactor"]

V = TypeVar("V")

_replace = msgspec.structs.replace


class Redactor:
    """Replaces token ids and block hashes by numbers in the order of first appearance.

    A number is the same wherever its token or hash appears. The real values cannot be
    worked out from it: it holds nothing of them, as a hash over a known vocabulary would.
    Texts, stop strings and salts go.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._hashes: dict[int, int] = {}
        self._salts: dict[str, str] = {}

    def snapshot(self, snapshot: EngineSnapshot) -> EngineSnapshot:
        info = snapshot.info
        return _replace(
            snapshot,
            # a folder's name may do, the way to it says whose it is
            info=_replace(info, model=PurePath(info.model).name)
            if PurePath(info.model).is_absolute()
            else info,
            blocks=tuple(
                _replace(
                    block,
                    block_hash=self._hash(block.block_hash),
                    token_ids=self._ids(block.token_ids),
                )
                for block in snapshot.blocks
            ),
            requests=tuple(
                _replace(
                    request,
                    request=self._request(request.request),
                    output_token_ids=self._ids(request.output_token_ids),
                    text="",
                )
                for request in snapshot.requests
            ),
        )

    def boundary(self, boundary: AnyBoundary) -> AnyBoundary:
        if isinstance(boundary, EngineCoreRequest):
            return self._request(boundary)
        if isinstance(boundary, SchedulerOutput):
            return self._scheduler_output(boundary)
        if isinstance(boundary, ModelRunnerOutput):
            return self._model_runner_output(boundary)
        if isinstance(boundary, EngineCoreOutputs):
            return self._core_outputs(boundary)
        return self._request_output(boundary)

    # -- struct by struct --------------------------------------------------------

    def _request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        salt = request.cache_salt
        if salt is not None:
            salt = self._salts.setdefault(salt, f"salt {len(self._salts)}")
        return _replace(
            request,
            prompt_token_ids=self._ids(request.prompt_token_ids),
            sampling_params=self._params(request.sampling_params),
            eos_token_id=None if request.eos_token_id is None else self._id(request.eos_token_id),
            cache_salt=salt,
            prompt=None,
            prompt_offsets=(),
        )

    def _scheduler_output(self, output: SchedulerOutput) -> SchedulerOutput:
        known = output.scheduled_cached_reqs
        return _replace(
            output,
            scheduled_new_reqs=tuple(
                _replace(
                    new,
                    prompt_token_ids=self._ids(new.prompt_token_ids),
                    sampling_params=self._params(new.sampling_params),
                )
                for new in output.scheduled_new_reqs
            ),
            scheduled_cached_reqs=_replace(
                known,
                new_token_ids=tuple(map(self._ids, known.new_token_ids)),
                all_token_ids=self._values(known.all_token_ids),
            ),
            scheduled_spec_decode_tokens=self._values(output.scheduled_spec_decode_tokens),
            kv_events=tuple(map(self._event, output.kv_events)),
        )

    def _model_runner_output(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        logprobs = output.logprobs
        return _replace(
            output,
            sampled_token_ids=tuple(map(self._ids, output.sampled_token_ids)),
            logprobs=None if logprobs is None else tuple(map(self._lists, logprobs)),
            prompt_logprobs_dict={
                request_id: _known(self._lists(lists))
                for request_id, lists in output.prompt_logprobs_dict.items()
            },
        )

    def _core_outputs(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        return _replace(
            outputs,
            outputs=tuple(
                _replace(
                    output,
                    new_token_ids=self._ids(output.new_token_ids),
                    new_logprobs=self._lists(output.new_logprobs),
                    new_prompt_logprobs_tensors=self._lists(output.new_prompt_logprobs_tensors),
                    stop_reason=self._stop(output.stop_reason),
                )
                for output in outputs.outputs
            ),
            kv_events=tuple(map(self._event, outputs.kv_events)),
        )

    def _request_output(self, output: RequestOutput) -> RequestOutput:
        prompt_logprobs = output.prompt_logprobs
        return _replace(
            output,
            prompt=None,
            prompt_token_ids=self._ids(output.prompt_token_ids),
            prompt_logprobs=None
            if prompt_logprobs is None
            else tuple(None if p is None else self._logprobs(p) for p in prompt_logprobs),
            outputs=tuple(map(self._completion, output.outputs)),
        )

    def _completion(self, completion: CompletionOutput) -> CompletionOutput:
        logprobs = completion.logprobs
        return _replace(
            completion,
            text="",
            token_ids=self._ids(completion.token_ids),
            logprobs=None if logprobs is None else tuple(map(self._logprobs, logprobs)),
            stop_reason=self._stop(completion.stop_reason),
        )

    def _params(self, params: SamplingParams) -> SamplingParams:
        bias = params.logit_bias
        allowed = params.allowed_token_ids
        return params.replace(
            stop=(),
            bad_words=(),
            stop_token_ids=self._ids(params.stop_token_ids),
            logit_bias=None if bias is None else {self._id(t): b for t, b in bias.items()},
            allowed_token_ids=None if allowed is None else self._ids(allowed),
        )

    def _event(self, event: KVEvent) -> KVEvent:
        if isinstance(event, BlockStored):
            return _replace(
                event,
                block_hash=_known(self._hash(event.block_hash)),
                parent_block_hash=self._hash(event.parent_block_hash),
                token_ids=self._ids(event.token_ids),
            )
        if isinstance(event, BlockRemoved):
            return _replace(event, block_hash=_known(self._hash(event.block_hash)))
        return event

    # -- value by value ----------------------------------------------------------

    def _id(self, token_id: int) -> int:
        if token_id < 0:  # a placeholder, not a token
            return token_id
        return self._tokens.setdefault(token_id, len(self._tokens))

    def _ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(self._id, token_ids))

    def _values(self, token_ids: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {key: self._ids(ids) for key, ids in token_ids.items()}

    def _hash(self, block_hash: int | None) -> int | None:
        if block_hash is None:
            return None
        return self._hashes.setdefault(block_hash, len(self._hashes))

    def _stop(self, reason: int | str | None) -> int | str | None:
        if isinstance(reason, str):
            return "redacted"
        return None if reason is None else self._id(reason)

    def _lists(self, lists: LogprobsLists | None) -> LogprobsLists | None:
        if lists is None:
            return None
        return _replace(lists, logprob_token_ids=tuple(map(self._ids, lists.logprob_token_ids)))

    def _logprobs(self, logprobs: Mapping[int, Logprob]) -> dict[int, Logprob]:
        return {
            self._id(token_id): _replace(logprob, decoded_token=None)
            for token_id, logprob in logprobs.items()
        }


def _known(value: V | None) -> V:
    assert value is not None
    return value
