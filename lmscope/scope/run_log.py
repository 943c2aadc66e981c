"""RunLog: what each step did, kept in bounded memory, so that a reader who comes late sees it.

A view shows one moment. The log keeps the counts of the steps before it, where content that
was evicted went, and why the requests admitted in this step missed the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from lmscope.boundary import BlockStored, SchedulerOutput
from lmscope.decisions import Miss, PrefixMiss
from lmscope.scope.prefix_miss import sure_miss
from lmscope.scope.why import missed

if TYPE_CHECKING:
    from lmscope.scope.request_view import RequestView
    from lmscope.scope.view import EngineView

__all__ = ["LOG_NAMES", "RunLog", "StepRecord", "record_step", "step_stat"]

LOG_NAMES = (
    "used", "kept", "empty", "shared", "hits", "evicted", "running", "waiting", "finished",
    "scheduled", "decode", "prefill", "recompute", "cached", "prompt_tokens", "cached_tokens",
    "output_tokens", "preemptions", "evictions", "step_ms", "device_ms",
)  # fmt: skip
"""The counts of a step, in the order in which a record keeps them."""

# Beyond so many records, neighbours in the older half are joined.
_MOST_RECORDS = 256
# Hashes of evicted content that are remembered.
_MOST_LOST = 4096
# Up to so many blocks are looked through for the same tokens under another hash.
_MOST_SEARCHED = 4096

_EVENTS = tuple(LOG_NAMES.index(name) for name in ("hits", "evicted"))
_WORK = tuple(
    LOG_NAMES.index(name)
    for name in ("scheduled", "decode", "prefill", "recompute", "cached", "step_ms", "device_ms")
)
_WAITING = LOG_NAMES.index("waiting")


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """The end of one step, or of several that follow one another.

    first_step   the first step that it stands for; `step` is the last
    time         seconds on the engine's clock
    counts       in the order of LOG_NAMES. Of several steps: hits and evictions are sums,
                 waiting is the largest, what was computed is that of the busiest step, the
                 rest is as the last step left it
    preempted    ids of the requests that were preempted
    """

    first_step: int
    step: int
    time: float
    counts: tuple[Any, ...]
    preempted: tuple[str, ...] = ()


class RunLog:
    """The steps so far, oldest first.

    misses   of the requests that this step admitted: where the prefix cache ended, and why
    """

    def __init__(self, limit: int = _MOST_RECORDS) -> None:
        self.misses: dict[str, str] = {}
        self._records: list[StepRecord] = []
        self._limit = limit
        self._lost: OrderedDict[int, tuple[int, str]] = OrderedDict()

    def copy(self) -> RunLog:
        other = RunLog(self._limit)
        other.misses = self.misses
        other._records = self._records.copy()
        other._lost = self._lost.copy()
        return other

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The steps that are over."""
        return tuple(self._records)

    def since(self, step: int) -> Iterator[StepRecord]:
        """The records that end at `step` or later."""
        first = len(self._records)
        while first and self._records[first - 1].step >= step:
            first -= 1
        return iter(self._records[first:])

    def close_step(self, view: EngineView) -> None:
        """The step that the view shows is over: another one begins."""
        last = self._records[-1].step if self._records else -1
        if view.step <= last:
            return
        self._records.append(record_step(view))
        if len(self._records) > self._limit:
            self._join_oldest()

    def begin_step(self, view: EngineView, output: SchedulerOutput) -> None:
        """The scheduler has decided, and the view knows."""
        self.misses = {}
        if view.info.enable_prefix_caching:
            resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
            admitted = (new.req_id for new in output.scheduled_new_reqs)
            for request_id in (*admitted, *resumed):
                record = view.requests.get(request_id)
                if record is not None:
                    self.misses[request_id] = self._miss(view, record)
        for gone in view.evicted:
            self._lost[gone.block_hash] = (view.step, gone.for_request_id)
            self._lost.move_to_end(gone.block_hash)
        if self._lost:
            for event in output.kv_events:
                if isinstance(event, BlockStored):
                    self._lost.pop(event.block_hash, None)
            while len(self._lost) > _MOST_LOST:
                self._lost.popitem(last=False)

    def _miss(self, view: EngineView, request: RequestView) -> str:
        """Where the reuse of a request that has just been admitted ends, and why there."""
        scheduled = request.work[-1] if request.work else None
        cached = scheduled.cached if scheduled is not None else 0
        # Tokens that the look-up saw: those of the prompt, and of the output after a preemption.
        num_tokens = request.num_tokens
        miss = sure_miss(view.info, request.request.sampling_params, num_tokens, cached)
        if miss is None and num_tokens - cached == view.info.block_size:
            miss = PrefixMiss(Miss.TAIL_RECOMPUTE, cached)
        miss = miss or self._missed_block(view, request, cached)
        # Which earlier prompt was the most alike is in a recording only.
        return f"missed from token {cached}: never seen" if miss is None else missed(miss)

    def _missed_block(
        self, view: EngineView, request: RequestView, cached: int
    ) -> PrefixMiss | None:
        """Why the block behind the cached tokens was not there; None: it never was, for all
        that is remembered."""
        size = view.info.block_size
        index = cached // size
        block = view.blocks[request.block_ids[index]] if index < len(request.block_ids) else None
        block_hash = None if block is None else block.block_hash
        lost = None if block_hash is None else self._lost.get(block_hash)
        if lost is not None:
            step, taker = lost
            return PrefixMiss(Miss.EVICTED, cached, removed_step=step, other_id=taker)
        tokens = request.token_ids(index * size, (index + 1) * size)
        if view.num_used + view.num_kept <= _MOST_SEARCHED and any(
            other.token_ids == tokens
            and other.index == index
            and other.block_hash != block_hash
            and self._has_other_salt(view, other.stored_by, request)
            for other in view.blocks.not_empty()
        ):
            return PrefixMiss(Miss.OTHER_SALT, cached)
        return None

    @staticmethod
    def _has_other_salt(view: EngineView, storer: str | None, request: RequestView) -> bool:
        other = view.requests.get(storer) if storer is not None else None
        return other is not None and other.request.cache_salt != request.request.cache_salt

    def _join_oldest(self) -> None:
        old, new = self._records[: self._limit // 2], self._records[self._limit // 2 :]
        joined = [_join(*old[k : k + 2]) for k in range(0, len(old) - 1, 2)]
        self._records = [*joined, *old[len(joined) * 2 :], *new]


def record_step(view: EngineView) -> StepRecord:
    """The step that the view shows, as it stands."""
    return StepRecord(view.step, view.step, view.time, _counts(view), tuple(view.preempted))


def step_stat(view: EngineView) -> dict[str, Any]:
    """The counts of the picture, as docs/picture.md names them."""
    rate = view.tokens_per_s
    return {
        **dict(zip(LOG_NAMES, _counts(view), strict=True)),
        "tokens_per_s": None if rate is None else round(rate, 1),
    }


def _counts(view: EngineView) -> tuple[Any, ...]:
    step, totals = view.this_step, view.totals
    return (
        view.num_used,
        view.num_kept,
        view.num_empty,
        view.num_shared,
        len(view.hits),
        len(view.evicted),
        view.num_running,
        view.num_waiting,
        totals.finished,
        step.scheduled,
        step.decode,
        step.prefill,
        step.recomputed,
        step.cached,
        totals.prompt_tokens,
        totals.cached_tokens,
        totals.output_tokens,
        totals.preemptions,
        totals.evictions,
        _milliseconds(step.duration_s),
        _milliseconds(step.device_duration_s),
    )


def _milliseconds(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1000, 3)


def _join(first: StepRecord, second: StepRecord) -> StepRecord:
    counts = list(second.counts)
    for place in _EVENTS:
        counts[place] += first.counts[place]
    counts[_WAITING] = max(first.counts[_WAITING], second.counts[_WAITING])
    if first.counts[_WORK[0]] > second.counts[_WORK[0]]:
        for place in _WORK:
            counts[place] = first.counts[place]
    return StepRecord(
        first.first_step,
        second.step,
        second.time,
        tuple(counts),
        (*first.preempted, *second.preempted),
    )
