"""Frames: a recording as pandas data frames.

    recording.frames.steps.plot(x="step", y="used_blocks")

Times are seconds since the recording began, counts are tokens unless a name says
otherwise, and a value that does not exist is <NA> or NaN. docs/frames.md lists all columns.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lmscope.boundary import (
    AllBlocksCleared,
    AnyBoundary,
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    BlockTouched,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVEvent,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.decisions import Code, Decision, Outcome
from lmscope.scope.request_view import RequestView
from lmscope.scope.view import EngineView

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Frames"]

Row = dict[str, Any]

# Columns that may have no value in some rows, and integers in the others.
_MAYBE_INTEGERS = frozenset({
    "arrival_step", "first_scheduled_step", "first_token_step", "finish_step", "max_tokens",
    "block_id", "stored_step", "index", "rank",
})  # fmt: skip

# Why a request may wait; `requests` has two columns for each.
_REASONS = (
    Code.NO_BLOCKS, Code.BUDGET, Code.SEATS, Code.BEHIND, Code.AFTER_PREEMPTION,
    Code.AFTER_SELF_PREEMPTION, Code.CHUNKING_OFF, Code.LENGTH_LIMIT, Code.IN_FLIGHT,
)  # fmt: skip
_NO_WAITS: Row = {f"{code}_steps": 0 for code in _REASONS} | {f"{code}_s": 0.0 for code in _REASONS}

_STEPS = (
    "step", "time_s", "step_s", "device_s", "scheduled_tokens", "prefill_tokens",
    "decode_tokens", "recomputed_tokens", "cached_tokens", "output_tokens", "running", "waiting",
    "used_blocks", "shared_blocks", "kept_blocks", "empty_blocks", "hits", "evictions",
    "preemptions",
)  # fmt: skip
_REQUESTS = (
    "request_id", "status", "finish_reason", "stop_reason", "priority", "prompt_tokens",
    "cached_tokens", "output_tokens", "max_tokens", "preemptions", "lost_tokens",
    "recomputed_tokens", "max_blocks", "arrival_step", "first_scheduled_step",
    "first_token_step", "finish_step", "arrival_s", "first_scheduled_s", "first_token_s",
    "finish_s", "waited_s", "ttft_s", "latency_s", *_NO_WAITS, "prompt", "text",
)  # fmt: skip
_BLOCKS = (
    "step", "time_s", "event", "block_id", "request_id", "block_hash", "parent_block_hash",
    "stored_by", "stored_step", "index",
)  # fmt: skip
_TOKENS = (
    "request_id", "position", "token_id", "text", "step", "time_s", "latency_s", "logprob", "rank",
)  # fmt: skip
_ATTENTION = ("step", "block_id", "request_id", "share")
_DECISIONS = ("step", *(f for f in Decision.__struct_fields__), "why")


class Frames:
    """Six data frames, made when they are first asked for and again when there is more.

    Each access gives a copy, so changing one changes nothing else.
    """

    def __init__(self, snapshot: EngineSnapshot, boundaries: Sequence[AnyBoundary]) -> None:
        self._snapshot = snapshot
        self._boundaries = boundaries
        self._lock = threading.Lock()
        self._tables: _Tables | None = None

    @property
    def steps(self) -> pd.DataFrame:
        """One row per engine step.

        step, time_s               when it was scheduled
        step_s                     from there to the end of the step; NaN if it has none
        device_s                   what of it a GPU worked, by its own clock; NaN on a CPU
        scheduled_tokens           = prefill_tokens + decode_tokens + recomputed_tokens
        cached_tokens              found in the prefix cache by this step's admissions
        output_tokens              sampled
        running, waiting           requests after the step
        used_blocks, shared_blocks, kept_blocks, empty_blocks   after the step
        hits, evictions            blocks
        preemptions                requests
        """
        return self._frame(lambda tables: tables.steps, _STEPS)

    @property
    def requests(self) -> pd.DataFrame:
        """One row per request, in the order of arrival; the state at the end.

        request_id, status, finish_reason, stop_reason, priority
        prompt_tokens, output_tokens, max_tokens
        cached_tokens              prefix-cache hits at the first admission; 0 before it
        preemptions                how often
        lost_tokens                computed and given up by preemptions
        recomputed_tokens          of these, scheduled again
        max_blocks                 the most blocks it held
        arrival_step, first_scheduled_step, first_token_step, finish_step
        arrival_s, first_scheduled_s, first_token_s, finish_s   the same as times
        waited_s                   arrival to first scheduled
        ttft_s                     arrival to first token
        latency_s                  arrival to finish
        no_blocks_steps, budget_steps, seats_steps, behind_steps, after_preemption_steps,
        after_self_preemption_steps, chunking_off_steps, length_limit_steps, in_flight_steps
                                   steps in which it got nothing, for this reason (`Code`)
        no_blocks_s, budget_s, seats_s, behind_s, after_preemption_s, after_self_preemption_s,
        chunking_off_s, length_limit_s, in_flight_s
                                   the same as time: from when a step was scheduled to the next
                                   one; for the last, to the end of the recording
        prompt, text               the prompt is <NA> when it was given as token ids
        """
        return self._frame(lambda tables: tables.requests, _REQUESTS)

    @property
    def blocks(self) -> pd.DataFrame:
        """One row per KV event, in the order of happening.

        step, time_s               of the struct that carries it
        event                      allocated, touched, stored, freed, removed or cleared
        block_id                   <NA> for cleared
        request_id                 who took, hit, filled or freed it; for removed: for whom
                                   its content had to go, nothing when it was dropped
        block_hash, parent_block_hash   16 hex digits; stored, touched and removed only
        stored_by, stored_step     whose content was hit or removed
        index                      position in the request's block table; stored only
        """
        return self._frame(lambda tables: tables.blocks, _BLOCKS)

    @property
    def tokens(self) -> pd.DataFrame:
        """One row per output token, in the order of sampling.

        request_id, position       position in the output, from 0
        token_id, text             text is "" for a part of a character; with stop strings
                                   it may come with a later token
        step, time_s               when it was taken in
        latency_s                  since the token before; for the first, since arrival
        logprob, rank              of the token, where the request asked for them
        """
        return self._frame(lambda tables: tables.tokens, _TOKENS)

    @property
    def decisions(self) -> pd.DataFrame:
        """One row per step and live request: what the step did with it, and why.

        step, request_id, outcome, code, and the quantities of `lmscope.decisions.Decision`;
        why                        the sentence
        """
        return self._frame(lambda tables: tables.decisions, _DECISIONS)

    @property
    def attention(self) -> pd.DataFrame:
        """One row per step, request and block; none where nobody measured attention.

        step, block_id, request_id
        share                      of what the query of the request's newest token gave to all
                                   its blocks, mean over layers and heads: those of a request
                                   in a step add up to 1
        """
        return self._frame(lambda tables: tables.attention, _ATTENTION)

    def _frame(
        self,
        choose: Callable[[_Tables], Sequence[Row | tuple[Any, ...]]],
        columns: tuple[str, ...],
    ) -> pd.DataFrame:
        import pandas as pd

        with self._lock:
            if self._tables is None or self._tables.num_folded != len(self._boundaries):
                self._tables = _Tables(self._snapshot, self._boundaries)
            frame = pd.DataFrame(choose(self._tables), columns=list(columns))
        for column in columns:
            if column in _MAYBE_INTEGERS:
                frame[column] = frame[column].astype("Int64")
        return frame


class _Tables:
    """The rows of all frames, collected in one go through the structs."""

    def __init__(self, snapshot: EngineSnapshot, boundaries: Sequence[AnyBoundary]) -> None:
        self.num_folded = len(boundaries)
        self.steps: list[Row] = []
        self.blocks: list[Row] = []
        self.tokens: list[Row] = []
        self.decisions: list[Row] = []
        self.attention: list[tuple[int, int, str, float]] = []
        self._view = EngineView(snapshot)
        self._start: float | None = snapshot.time or None
        # steps that are on their way
        self._step_rows: dict[int, Row] = {}
        # requests whose id came again, and the rows of each request's tokens
        self._earlier: list[RequestView] = []
        self._texts: dict[str, list[int]] = {}
        self._last_token: dict[str, float] = {}
        # what each request has waited for, by its arrival order, and who has waited since
        # the last step was scheduled
        self._waits: dict[int, Row] = {}
        self._waiting: list[tuple[RequestView, Code]] = []
        self._waiting_since = 0.0
        for boundary in boundaries:
            self._add(boundary)
        self._end_waits(self._view.time)
        self.requests = [
            self._request_row(record)
            for record in sorted(
                (*self._earlier, *self._view.requests.values()), key=lambda r: r.arrival_order
            )
        ]

    def _add(self, boundary: AnyBoundary) -> None:
        if self._start is None:
            self._start = boundary.time
        if isinstance(boundary, EngineCoreRequest):
            self._arrive(boundary)
        elif isinstance(boundary, SchedulerOutput):
            self._add_events(boundary.kv_events, boundary)
        elif isinstance(boundary, EngineCoreOutputs):
            self._add_events(boundary.kv_events, boundary)
            self._add_tokens(boundary)
        elif isinstance(boundary, RequestOutput):
            self._add_text(boundary)
        self._view.apply(boundary)
        if isinstance(boundary, SchedulerOutput):
            self._add_step(boundary)
            self._end_waits(boundary.time)
            self._add_decisions()
        elif isinstance(boundary, ModelRunnerOutput):
            self._time_on_device(boundary)
            self._add_attention(boundary)
        elif isinstance(boundary, EngineCoreOutputs):
            self._end_step(boundary)

    def _seconds(self, time: float | None) -> float:
        return math.nan if time is None else time - (self._start or 0.0)

    def _arrive(self, request: EngineCoreRequest) -> None:
        earlier = self._view.requests.get(request.request_id)
        if earlier is not None:
            self._earlier.append(earlier)
        self._texts[request.request_id] = []
        self._last_token[request.request_id] = request.time

    def _add_step(self, output: SchedulerOutput) -> None:
        counts = self._view.this_step
        row: Row = {
            "step": output.step,
            "time_s": self._seconds(output.time),
            "step_s": math.nan,
            "device_s": math.nan,
            "scheduled_tokens": counts.scheduled,
            "prefill_tokens": counts.prefill,
            "decode_tokens": counts.decode,
            "recomputed_tokens": counts.recomputed,
            "cached_tokens": counts.cached,
            "output_tokens": 0,
            "hits": len(self._view.hits),
            "evictions": len(self._view.evicted),
            "preemptions": counts.preemptions,
        }
        self.steps.append(row)
        self._step_rows[output.step] = row
        self._add_state(row)

    def _time_on_device(self, output: ModelRunnerOutput) -> None:
        row = self._step_rows.get(output.step)
        if row is not None and output.device_duration_s is not None:
            row["device_s"] = output.device_duration_s

    def _end_step(self, outputs: EngineCoreOutputs) -> None:
        # Not always the last row: steps may overlap.
        row = self._step_rows.pop(outputs.step, None)
        if row is not None:
            row["step_s"] = self._seconds(outputs.time) - row["time_s"]
            row["output_tokens"] = sum(len(o.new_token_ids) for o in outputs.outputs)
            self._add_state(row)

    def _add_state(self, row: Row) -> None:
        view = self._view
        row.update(
            running=view.num_running,
            waiting=view.num_waiting,
            used_blocks=view.num_used,
            shared_blocks=view.num_shared,
            kept_blocks=view.num_kept,
            empty_blocks=view.num_empty,
        )

    def _add_attention(self, output: ModelRunnerOutput) -> None:
        for request_id, block_ids, shares in self._view.attended(output):
            # The table may be longer by then, when the next step is scheduled already.
            self.attention += (
                (output.step, block_id, request_id, share)
                for block_id, share in zip(block_ids, shares, strict=False)
            )

    def _add_decisions(self) -> None:
        decisions = self._view.decisions
        sentences = self._view.sentences(decisions)
        for request_id, decision in decisions.items():
            row: Row = {"step": self._view.step, **msgspec.structs.asdict(decision)}
            row["outcome"], row["code"] = str(decision.outcome), str(decision.code)
            row["why"] = sentences.get(request_id)
            self.decisions.append(row)
            record = self._view.requests.get(request_id)
            if decision.outcome is Outcome.WAITING and record is not None:
                self._waiting.append((record, decision.code))

    def _end_waits(self, time: float) -> None:
        """Count the last step for all who waited in it, and its time up to `time`.

        Of a request that ended meanwhile, up to its end.
        """
        for record, code in self._waiting:
            waits = self._waits.setdefault(record.arrival_order, dict(_NO_WAITS))
            end = time if record.finish_time is None else min(time, record.finish_time)
            waits[f"{code}_steps"] += 1
            waits[f"{code}_s"] += max(0.0, end - self._waiting_since)
        self._waiting, self._waiting_since = [], time

    def _add_events(
        self, events: Sequence[KVEvent], boundary: SchedulerOutput | EngineCoreOutputs
    ) -> None:
        blocks = self._view.blocks
        # Hashes and storers of blocks that changed within these events.
        known: dict[int, tuple[int | None, str | None, int]] = {}
        for event in events:
            row: Row = {"step": boundary.step, "time_s": self._seconds(boundary.time)}
            if isinstance(event, AllBlocksCleared):
                row["event"] = "cleared"
                self.blocks.append(row)
                continue
            block_id = event.block_id
            block = blocks[block_id]
            content = known.get(block_id, (block.block_hash, block.stored_by, block.stored_step))
            row["block_id"] = block_id
            if isinstance(event, BlockRemoved):
                row["request_id"], row["event"] = event.for_request_id, "removed"
                row["block_hash"] = _hex(event.block_hash)
                row["stored_by"], row["stored_step"] = content[1:]
                known[block_id] = (None, None, 0)
            else:
                row["request_id"] = event.request_id
            if isinstance(event, BlockAllocated):
                row["event"] = "allocated"
            elif isinstance(event, BlockFreed):
                row["event"] = "freed"
            elif isinstance(event, BlockTouched):
                row["event"] = "touched"
                row["block_hash"] = _hex(content[0])
                row["stored_by"], row["stored_step"] = event.stored_by, event.stored_step
            elif isinstance(event, BlockStored):
                row["event"] = "stored"
                row["block_hash"] = _hex(event.block_hash)
                row["parent_block_hash"] = _hex(event.parent_block_hash)
                row["index"] = event.index
                known[block_id] = (event.block_hash, event.request_id, boundary.step)
            self.blocks.append(row)

    def _add_tokens(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            record = self._view.requests.get(output.request_id)
            if record is None:
                continue
            logprobs = output.new_logprobs
            before = self._last_token.get(output.request_id)
            for place, token_id in enumerate(output.new_token_ids):
                row: Row = {
                    "request_id": output.request_id,
                    "position": record.num_output_tokens + place,
                    "token_id": token_id,
                    "text": "",
                    "step": outputs.step,
                    "time_s": self._seconds(outputs.time),
                    "latency_s": math.nan if before is None else outputs.time - before,
                    "logprob": math.nan,
                }
                if logprobs is not None and place < len(logprobs.logprobs):
                    row["logprob"] = logprobs.logprobs[place][0]
                    row["rank"] = logprobs.sampled_token_ranks[place]
                before = outputs.time
                self._texts.setdefault(output.request_id, []).append(len(self.tokens))
                self.tokens.append(row)
            if before is not None:
                self._last_token[output.request_id] = before

    def _add_text(self, output: RequestOutput) -> None:
        """Give the last token of this delta its text."""
        record = self._view.requests.get(output.request_id)
        rows = self._texts.get(output.request_id, [])
        if record is None or not rows:
            return
        given = len(record.pieces)
        for completion in output.outputs:
            given += len(completion.token_ids)
            # Without a token of its own the text was held back before.
            place = min(given, record.num_output_tokens) - 1
            first = record.num_output_tokens - len(rows)
            if completion.text and 0 <= place - first < len(rows):
                self.tokens[rows[place - first]]["text"] += completion.text

    def _request_row(self, record: RequestView) -> Row:
        def since_arrival(time: float | None) -> float:
            return math.nan if time is None else time - record.arrival_time

        return {
            "request_id": record.request_id,
            "status": record.status,
            "finish_reason": record.finish_reason,
            "stop_reason": record.stop_reason,
            "priority": record.request.priority,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": max(0, record.num_cached_tokens),
            "output_tokens": record.num_output_tokens,
            "max_tokens": record.max_tokens,
            "preemptions": record.num_preemptions,
            "lost_tokens": record.num_lost_tokens,
            "recomputed_tokens": record.num_recomputed_tokens,
            "max_blocks": record.max_blocks,
            "arrival_step": record.arrival_step,
            "first_scheduled_step": record.first_scheduled_step,
            "first_token_step": record.first_token_step,
            "finish_step": record.finish_step,
            "arrival_s": self._seconds(record.arrival_time),
            "first_scheduled_s": self._seconds(record.first_scheduled_time),
            "first_token_s": self._seconds(record.first_token_time),
            "finish_s": self._seconds(record.finish_time),
            "waited_s": since_arrival(record.first_scheduled_time),
            "ttft_s": since_arrival(record.first_token_time),
            "latency_s": since_arrival(record.finish_time),
            **self._waits.get(record.arrival_order, _NO_WAITS),
            "prompt": record.prompt,
            "text": record.text,
        }


def _hex(block_hash: int | None) -> str | None:
    return None if block_hash is None else f"{block_hash:016x}"
