"""Request: one request inside the scheduler, with everything about it that changes."""

from __future__ import annotations

import enum

from lmscope.boundary import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest
from lmscope.decisions import Decision
from lmscope.engine.prefix_hash import BlockHasher

__all__ = ["Request", "RequestStatus"]


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything after PREEMPTED is finished."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        """The word a user sees; None while the request is not finished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One request and its counters. The scheduler owns it; nobody else writes to it.

    `num_computed_tokens` counts tokens whose keys and values are computed or scheduled to
    be: it rises when a step is scheduled, before the model has run.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hasher",
        "block_hashes",
        "core_request",
        "decision",
        "discard_latest_async_tokens",
        "eos_token_id",
        "events",
        "is_prefill_chunk",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens_lost",
        "priority",
        "request_id",
        "sampling_params",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "status",
        "steady_until",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(self, core_request: EngineCoreRequest, block_hasher: BlockHasher | None) -> None:
        params = core_request.sampling_params
        self.core_request = core_request
        self.request_id = core_request.request_id
        self.sampling_params = params
        self.priority = core_request.priority
        self.arrival_time = core_request.arrival_time
        # The front end fills max_tokens in; None here means no limit but the length's.
        self.max_tokens = params.max_tokens if params.max_tokens is not None else 1 << 62
        self.min_tokens = params.min_tokens
        # no token is None
        self.eos_token_id = None if params.ignore_eos else core_request.eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.skip_reading_prefix_cache = bool(params.skip_reading_prefix_cache)

        self.status = RequestStatus.WAITING
        self.all_token_ids = list(core_request.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        # Up to here, in computed tokens, a decode needs no more than the next slot of a block
        # that it holds: no block begins or gets full, and no limit is near.
        self.steady_until = 0
        # prefix hits at the first admission; never rewritten when it resumes
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        # computed before the last preemption and not yet computed again
        self.num_tokens_lost = 0
        self.is_prefill_chunk = False
        self.spec_token_ids: list[int] = []
        # async scheduling: tokens scheduled to be produced but not returned yet
        self.num_output_placeholders = 0
        self.discard_latest_async_tokens = False
        # the stop token, or what was wrong
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        # what schedule() said about it last
        self.decision: Decision | None = None

        self.block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.all_token_ids[self.num_prompt_tokens :])

    def append_output_token_id(self, token_id: int) -> None:
        token_ids, hasher = self.all_token_ids, self.block_hasher
        token_ids.append(token_id)
        if hasher is not None and len(token_ids) % hasher.block_size == 0:
            self._extend_hashes()

    def check_stop(self, max_model_len: int) -> bool:
        """Finish the request if the token appended last ends it.

        Order as in vLLM: nothing before min_tokens, then EOS, stop tokens, length. EOS
        leaves `stop_reason` None.
        """
        num_tokens = len(self.all_token_ids)
        num_output_tokens = num_tokens - self.num_prompt_tokens
        if num_output_tokens < self.min_tokens:
            return False
        token_id = self.all_token_ids[-1]
        if token_id == self.eos_token_id:
            self.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in self.stop_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = token_id
            return True
        if num_tokens >= max_model_len or num_output_tokens >= self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def record_event(self, kind: EngineCoreEventType, timestamp: float) -> None:
        self.events.append(EngineCoreEvent(kind, timestamp))

    def take_events(self) -> tuple[EngineCoreEvent, ...]:
        """Events since the last call."""
        if not self.events:
            return ()
        events = tuple(self.events)
        self.events.clear()
        return events

    def _extend_hashes(self) -> None:
        if self.block_hasher is not None:
            self.block_hasher.extend(
                self.block_hashes, self.all_token_ids, self.core_request.cache_salt
            )
