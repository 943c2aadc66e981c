"""The structs that cross a boundary inside the engine, in the order in which they cross.

One engine step emits, on one thread and in this order:

    EngineCoreRequest     a request enters the engine (step: the last finished step)
    SchedulerOutput       the scheduler has decided; the model has not run
    ModelRunnerOutput     the model has run and tokens are sampled
    EngineCoreOutputs     the scheduler has taken the tokens in
    RequestOutput         one per request that produced something: this step's delta

They carry vLLM's names and those of vLLM's fields that mean something here. All are
frozen, hold no tensors and are never aliased to state that changes later, so a struct
kept from step 1 still shows step 1 at step 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from lmscope.decisions import Behind, Decision
from lmscope.sampling_params import SamplingParams

__all__ = [
    "BOUNDARIES",
    "AllBlocksCleared",
    "AnyBoundary",
    "BlockAllocated",
    "BlockFreed",
    "BlockRemoved",
    "BlockSnapshot",
    "BlockStored",
    "BlockTouched",
    "Boundary",
    "CachedRequestData",
    "CompletionOutput",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineInfo",
    "EngineSnapshot",
    "KVEvent",
    "Logprob",
    "LogprobsLists",
    "ModelRunnerOutput",
    "NewRequestData",
    "PrefixCacheStats",
    "RequestOutput",
    "RequestSnapshot",
    "SchedulerOutput",
    "SchedulerStats",
    "SpecDecodingStats",
    "decode",
    "encode",
]


class Boundary(
    msgspec.Struct,
    frozen=True,
    tag=True,
    gc=False,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
):
    """What every struct that crosses a boundary carries.

    step   engine step, from 1; 0 before the first
    time   seconds on the monotonic clock of the emitting engine
    """

    step: int = 0
    time: float = 0.0


# ---------------------------------------------------------------------------
# 1. a request enters
# ---------------------------------------------------------------------------


class EngineCoreRequest(
    Boundary,
    frozen=True,
    tag=True,
    gc=False,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
):
    """One request on its way from the front end into the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    eos_token_id: int | None = None
    # seconds since the epoch; orders requests of equal priority
    arrival_time: float = 0.0
    cache_salt: str | None = None
    # smaller runs earlier; used by the priority policy only
    priority: int = 0
    # The prompt as text. None when it was given as ids and nobody was listening.
    prompt: str | None = None
    # For each prompt token the end of its text in `prompt`, in characters; empty when
    # `prompt` is None. Non-decreasing: a token that is part of a character adds nothing.
    prompt_offsets: tuple[int, ...] = ()


# ---------------------------------------------------------------------------
# 2. the scheduler decides
# ---------------------------------------------------------------------------


class BlockAllocated(
    msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """An unused block was taken from the head of the free queue for `request_id`."""

    block_id: int
    request_id: str


class BlockTouched(
    msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A prefix hit: `request_id` now also reads a block that `stored_by` filled.

    A block nobody held leaves the free queue with this.
    """

    block_id: int
    request_id: str
    stored_by: str
    stored_step: int


class BlockStored(
    msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A block became full and can be found under its hash from now on.

    block_hash          lowest 64 bits of the digest over parent, tokens and extra keys
    parent_block_hash   the same of the block before it; None for the first
    token_ids           the `block_size` tokens in it
    index               position in the request's block table
    """

    block_id: int
    request_id: str
    block_hash: int
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    index: int


class BlockFreed(
    msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """`request_id` let go of a block.

    When it was the last holder the block goes to the tail of the free queue and keeps
    its content until it is handed out again.
    """

    block_id: int
    request_id: str


class BlockRemoved(
    msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A kept block lost its content: evicted for `for_request_id` (None: explicitly)."""

    block_id: int
    block_hash: int
    for_request_id: str | None


class AllBlocksCleared(
    msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """The prefix cache was reset: no block can be found any more."""


KVEvent = BlockAllocated | BlockTouched | BlockStored | BlockFreed | BlockRemoved | AllBlocksCleared


class NewRequestData(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A request that is scheduled for the first time: everything the worker must know."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    # one tuple per KV cache group; all blocks of the request, prefix hits first
    block_ids: tuple[tuple[int, ...], ...]
    # tokens found in the prefix cache
    num_computed_tokens: int


class CachedRequestData(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Requests the worker knows already, column by column; running first, then resumed."""

    req_ids: tuple[str, ...] = ()
    # back from preemption: their `new_block_ids` replaces the worker's list
    resumed_req_ids: tuple[str, ...] = ()
    # filled only with pipeline parallelism, which lmscope does not have
    new_token_ids: tuple[tuple[int, ...], ...] = ()
    # whole token lists of those that were not scheduled in the previous step
    all_token_ids: Mapping[str, tuple[int, ...]] = {}
    # per request: None when no block was added, else one tuple per KV cache group
    new_block_ids: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()
    # computed before this step
    num_computed_tokens: tuple[int, ...] = ()
    # outputs so far, placeholders of async scheduling included
    num_output_tokens: tuple[int, ...] = ()

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


class SchedulerOutput(
    Boundary,
    frozen=True,
    tag=True,
    gc=False,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
):
    """What runs in this step, why, and what the block pool did to make it possible."""

    scheduled_new_reqs: tuple[NewRequestData, ...] = ()
    scheduled_cached_reqs: CachedRequestData = CachedRequestData()
    # in the order of scheduling: running requests first, then admitted ones; all > 0
    num_scheduled_tokens: Mapping[str, int] = {}
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: Mapping[str, tuple[int, ...]] = {}
    # per KV cache group: leading blocks that all requests which hold blocks share
    num_common_prefix_blocks: tuple[int, ...] = (0,)
    # finished or aborted since the previous schedule()
    finished_req_ids: tuple[str, ...] = ()
    preempted_req_ids: tuple[str, ...] = ()
    # one for each request that schedule() examined, in the order of examination ...
    decisions: tuple[Decision, ...] = ()
    # ... and one for the rest of the waiting queue, which it never looked at
    behind: Behind | None = None
    # since the previous boundary that carried events, in the order of happening
    kv_events: tuple[KVEvent, ...] = ()


# ---------------------------------------------------------------------------
# 3. the model runs
# ---------------------------------------------------------------------------


class LogprobsLists(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Log probabilities of N sampled (or prompt) tokens.

    logprob_token_ids     [N, k + 1]  column 0 is the token itself, then the top k, descending
    logprobs              [N, k + 1]  natural logarithm
    sampled_token_ranks   [N]         1 is the most likely; ties count
    """

    logprob_token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    sampled_token_ranks: tuple[int, ...]


class ModelRunnerOutput(
    Boundary,
    frozen=True,
    tag=True,
    gc=False,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
):
    """What the model answered, one row per request, in the order of the batch.

    The order of rows is the runner's, not the scheduler's: look a request up by its id.
    """

    req_ids: tuple[str, ...] = ()
    # () for a prefill that is not finished, one token normally, more with drafts
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    # one entry per row; None for rows that did not ask
    logprobs: tuple[LogprobsLists | None, ...] | None = None
    # only in the step in which a prompt's log probabilities are complete
    prompt_logprobs_dict: Mapping[str, LogprobsLists] = {}
    # by request, why its token means nothing (logits that are NaN): it ends with "error"
    errors: Mapping[str, str] = {}
    # only while somebody measures it: by request, for each block of its table in order, the
    # share of attention that the query of its newest token gave to the block in this step,
    # mean over heads and layers; the shares of a request sum to 1
    attention_mass: Mapping[str, tuple[float, ...]] = {}
    # how long a GPU had to do with the step, from the copies of the batch to its last token; None
    # where nobody timed it: on a CPU, and where the host had to wait within the step
    device_duration_s: float | None = None

    @property
    def req_id_to_index(self) -> dict[str, int]:
        """Row of each request."""
        return {request_id: row for row, request_id in enumerate(self.req_ids)}


# ---------------------------------------------------------------------------
# 4. the scheduler takes the tokens in
# ---------------------------------------------------------------------------


class EngineCoreEventType(IntEnum):
    """What happened to a request inside the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A moment in the life of a request; `timestamp` is monotonic, in seconds."""

    type: EngineCoreEventType
    timestamp: float


class EngineCoreOutput(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """What one request produced in one step."""

    request_id: str
    # already cut after a stop token
    new_token_ids: tuple[int, ...] = ()
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    # "stop", "length", "abort", "error"; None while it runs
    finish_reason: str | None = None
    # the stop token id; None for EOS. Stop strings are added by the front end.
    stop_reason: int | str | None = None
    # since the last output of this request
    events: tuple[EngineCoreEvent, ...] = ()
    # prefix-cache hits at the first admission, in tokens
    num_cached_tokens: int = 0


class PrefixCacheStats(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Prefix-cache look-ups since the last statistics, as vLLM counts them.

    Each attempt to admit a request counts, so one that waits at the head of the queue
    is counted once per step. `queries` and `hits` are tokens.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SpecDecodingStats(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Draft tokens since the last statistics."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()


class SchedulerStats(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Counts after the step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    # share of the usable blocks that live requests hold, 0 to 1
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats | None = None
    spec_decoding_stats: SpecDecodingStats | None = None


class EngineCoreOutputs(
    Boundary,
    frozen=True,
    tag=True,
    gc=False,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
):
    """What all requests produced in this step, and the counts after it."""

    outputs: tuple[EngineCoreOutput, ...] = ()
    scheduler_stats: SchedulerStats | None = None
    # since the SchedulerOutput of this step: blocks that finished requests let go of
    kv_events: tuple[KVEvent, ...] = ()


# ---------------------------------------------------------------------------
# 5. text for the user
# ---------------------------------------------------------------------------


class Logprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True):
    """Log probability of one token: natural logarithm, rank from 1, its text if known."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    # the stop string or stop token id; None for EOS, length and abort
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(
    Boundary,
    frozen=True,
    tag=True,
    gc=False,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
):
    """What the user gets of one request.

    The one that crosses the tap is this step's delta and leaves `prompt` and
    `prompt_token_ids` out, which its EngineCoreRequest has. The ones a caller receives
    are shaped by `output_kind` and carry both.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    outputs: tuple[CompletionOutput, ...] = ()
    finished: bool = False
    num_cached_tokens: int | None = None


AnyBoundary = (
    EngineCoreRequest | SchedulerOutput | ModelRunnerOutput | EngineCoreOutputs | RequestOutput
)

BOUNDARIES: tuple[type[Boundary], ...] = (
    EngineCoreRequest,
    SchedulerOutput,
    ModelRunnerOutput,
    EngineCoreOutputs,
    RequestOutput,
)
"""The five kinds, in the order in which they cross in a step."""


# ---------------------------------------------------------------------------
# where a reader starts: the engine's settings and its state at one moment
# ---------------------------------------------------------------------------


class EngineInfo(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """The settings of the engine that emits the stream, as a reader needs them.

    num_blocks          counts block 0, the null block, which is never handed out
    device              "cpu" or "cuda"; "" where no model runs, or a source does not tell
    attention_backend   "torch" or "triton"; "" as above
    async_scheduling    each step is scheduled while the one before runs, so structs overlap
    """

    model: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    # seconds since the epoch and on the monotonic clock, taken together
    wall_time: float = 0.0
    monotonic_time: float = 0.0
    enable_chunked_prefill: bool = True
    # most tokens of one request in one step; 0: no such limit
    long_prefill_token_threshold: int = 0
    device: str = ""
    attention_backend: str = ""
    async_scheduling: bool = False


class BlockSnapshot(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A block that is in use or keeps content; free empty blocks have none."""

    block_id: int
    # the requests that hold it, oldest holder first
    owners: tuple[str, ...] = ()
    # the next four: only of blocks that can be found in the prefix cache
    block_hash: int | None = None
    stored_by: str | None = None
    stored_step: int = 0
    token_ids: tuple[int, ...] = ()
    # grows with the time of storing; of two blocks with one hash the older is hit
    stored_order: int = 0


class RequestSnapshot(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """A live request in the middle of its life."""

    request: EngineCoreRequest
    # "waiting", "running" or "preempted"
    status: str
    output_token_ids: tuple[int, ...] = ()
    text: str = ""
    num_computed_tokens: int = 0
    # prefix-cache hits at the first admission; -1 before it
    num_cached_tokens: int = -1
    block_ids: tuple[int, ...] = ()
    num_preemptions: int = 0
    # computed before a preemption and not all computed again yet: up to this token; else 0
    num_tokens_lost: int = 0


class EngineSnapshot(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """The state of an engine between two structs of its stream.

    A reader that joins late starts here: folding the structs that follow gives the
    same picture as having folded everything from the beginning.
    """

    info: EngineInfo
    step: int = 0
    time: float = 0.0
    blocks: tuple[BlockSnapshot, ...] = ()
    # ids of free blocks, next to be handed out first
    free_queue: tuple[int, ...] = ()
    # running requests in running order, then waiting ones in queue order
    requests: tuple[RequestSnapshot, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyBoundary)


def encode(boundary: Boundary) -> bytes:
    """One struct of the stream as a tagged msgpack map."""
    return _ENCODER.encode(boundary)


def decode(data: bytes) -> AnyBoundary:
    """The struct that `encode` was given; msgspec.DecodeError when it is none."""
    return _DECODER.decode(data)
