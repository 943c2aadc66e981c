"""Sampler: from logits to one token per request, in the order of vLLM's pipeline.

    logits      as the model gave them, a grammar's mask already applied
    adjusted    float32, after LogitsAdjustment: allowed tokens, bad words, min_tokens,
                logit_bias, penalties. Greedy requests take the largest of these.
    processed   after temperature, min_p, top-k and top-p. The others draw from these.

Steps that no request in the batch needs are left out; a batch of plain greedy requests is
one pass over the logits. A row gives the same token alone and in any batch, bit for bit. On a
CPU with the extra `cpu` compiled loops choose tokens; where rounding could make theirs another
one, the row is left to what chooses without them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lmscope_kernels.sampling_cpu import (
    Changes,
    RowColumns,
    SamplingLoops,
    prepare_sampling_loops,
    sampling_loops,
)
from torch import Tensor

from lmscope.boundary import LogprobsLists
from lmscope.checks import nearest
from lmscope.execute.largest import largest
from lmscope.execute.logits_adjustment import LogitsAdjustment, adjusted_logits, changes_of
from lmscope.execute.random_rows import RandomRows, in_parts, random_rows, row_columns, rows_of
from lmscope.execute.sampling_row import SamplingRow
from lmscope.execute.token_logprobs import gather_logprobs, log_probabilities

__all__ = [
    "LogprobsMode",
    "Sampler",
    "SamplerOutput",
    "SamplingRow",
    "errors_of",
]

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

_MODES: tuple[str, ...] = get_args(LogprobsMode)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was sampled, one entry per row.

    token_ids  [R]
    logprobs   [R] one position each; None for rows that did not ask
    errors     by row, why its token means nothing: the request must end with an error
    """

    token_ids: list[int]
    logprobs: list[LogprobsLists | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples one token for each row of logits.

    logprobs_mode  what `logprobs` reports: log probabilities or logits, raw (of the model)
                   or processed (what was drawn from; greedy rows: adjusted)
    """

    def __init__(self, vocab_size: int, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        if logprobs_mode not in _MODES:
            raise ValueError(
                f"logprobs_mode is {logprobs_mode!r}; {nearest(logprobs_mode, _MODES)}"
            )
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode
        self._batch: _Batch | None = None
        self._adjustments: WeakKeyDictionary[SamplingRow, LogitsAdjustment] = WeakKeyDictionary()
        self._loops: SamplingLoops | None = None
        self._has_looked_for_loops = False

    def prepare(self, device: torch.device) -> None:
        """Compile what chooses tokens there, or load what an earlier process compiled.

        Some 5 seconds the first time, a few hundredths later. Without this, the first step in
        which something is drawn waits for it.
        """
        if self._loops_on(device) is not None:
            prepare_sampling_loops()

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """One token for each row; neither the logits nor the rows are changed.

        logits  [R, V] any floating type, row i for rows[i]
        """
        assert logits.shape == (len(rows), self.vocab_size)
        batch = self._batch_of(rows, logits.device)
        changes = batch.changes()
        if changes is None and not batch.has_random:
            best, token_ids = largest(logits)
        elif (loops := self._loops_on(logits.device)) is not None:
            best, token_ids = batch.choose_by(loops, logits, changes)
        else:
            best, token_ids = batch.choose(adjusted_logits(logits, changes))
        logprobs = self._logprobs(batch, logits, changes, token_ids)
        return SamplerOutput(token_ids.tolist(), logprobs, errors_of(best))

    @torch.inference_mode()
    def process(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """What `sample` draws from, or for a greedy row takes the largest of: [R, V] float32.

        It may be the logits themselves, so the caller must not change it.
        """
        assert logits.shape == (len(rows), self.vocab_size)
        batch = self._batch_of(rows, logits.device)
        return batch.process(adjusted_logits(logits, batch.changes()))

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> LogprobsLists:
        """Raw log probabilities of the prompt tokens that follow the given positions.

        logits   [N, V], row i computed from the prompt up to the token before targets[i]
        targets  [N] prompt token ids
        k        as in `gather_logprobs`
        """
        token_ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        return self._log_probabilities(logits, token_ids, k)

    def _log_probabilities(self, logits: Tensor, token_ids: Tensor, k: int) -> LogprobsLists:
        return log_probabilities(logits, token_ids, k, self._loops_on(logits.device))

    def _loops_on(self, device: torch.device) -> SamplingLoops | None:
        """The compiled loops, where they are for this device; made when first asked for."""
        if device.type != "cpu":
            return None
        if not self._has_looked_for_loops:
            self._loops = sampling_loops(self.vocab_size)
            self._has_looked_for_loops = True
        return self._loops

    def _batch_of(self, rows: Sequence[SamplingRow], device: torch.device) -> _Batch:
        """What is known of these rows, from the step before while they are the same."""
        batch = self._batch
        if (
            batch is None
            or batch.device != device
            or len(batch.rows) != len(rows)
            or not all(map(operator.is_, batch.rows, rows))
        ):
            batch = self._batch = _Batch(rows, self.vocab_size, device, self._adjustment_of)
        return batch

    def _adjustment_of(self, row: SamplingRow) -> LogitsAdjustment:
        """What was counted of a row, for as long as there is one."""
        adjustment = self._adjustments.get(row)
        if adjustment is None:
            adjustment = self._adjustments[row] = LogitsAdjustment(row, self.vocab_size)
        return adjustment

    def _logprobs(
        self, batch: _Batch, logits: Tensor, changes: Changes | None, token_ids: Tensor
    ) -> list[LogprobsLists | None]:
        lists: list[LogprobsLists | None] = [None] * len(batch.rows)
        if not batch.rows_by_num_logprobs:
            return lists
        is_raw = self.logprobs_mode.startswith("raw")
        reported = logits if is_raw else batch.process(adjusted_logits(logits, changes))
        for k, all_rows in batch.rows_by_num_logprobs.items():
            for rows in in_parts(all_rows, batch.device):
                values, chosen = rows_of(reported, rows), rows_of(token_ids, rows)
                columns = (
                    self._log_probabilities(values, chosen, k)
                    if self.logprobs_mode.endswith("logprobs")
                    else gather_logprobs(values.to(torch.float32), chosen, k)
                )
                for row, ids, logprobs, rank in zip(
                    rows,
                    columns.logprob_token_ids,
                    columns.logprobs,
                    columns.sampled_token_ranks,
                    strict=True,
                ):
                    lists[row] = LogprobsLists((ids,), (logprobs,), (rank,))
        return lists


class _Batch:
    """What the parameters of some rows ask for, column by column.

    adjustment_of    gives what a row changes in its logits, which outlives the batch
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device,
        adjustment_of: Callable[[SamplingRow], LogitsAdjustment],
    ) -> None:
        self.rows = tuple(rows)
        self.device = device
        self._vocab_size = vocab_size
        self._adjustment_of = adjustment_of
        self._adjustments = [
            (i, adjustment_of(row)) for i, row in enumerate(rows) if LogitsAdjustment.is_needed(row)
        ]
        self.rows_by_num_logprobs: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row.params.logprobs is not None:
                self.rows_by_num_logprobs.setdefault(row.params.logprobs, []).append(i)
        self.has_random = any(not row.params.is_greedy for row in rows)
        self._has_greedy = any(row.params.is_greedy for row in rows)

    @cached_property
    def _random(self) -> list[RandomRows]:
        return random_rows(self.rows, self._vocab_size, self.device)

    @cached_property
    def _columns(self) -> RowColumns:
        return row_columns(self.rows, self._vocab_size)

    def changes(self) -> Changes | None:
        """What this step's logits are changed by, before anything else; None: nothing."""
        return changes_of(self._adjustments, len(self.rows)) if self._adjustments else None

    def process(self, adjusted: Tensor) -> Tensor:
        """[R, V]: what random rows draw from, adjusted logits for greedy ones.

        `adjusted` is not changed, but may be what is returned.
        """
        if not self._random:
            return adjusted
        if not self._has_greedy and len(self._random) == 1:
            return self._random[0].process(adjusted)
        both = adjusted.clone()
        for part in self._random:
            both[part.indices] = part.process(adjusted)
        return both

    def choose(self, adjusted: Tensor) -> tuple[Tensor, Tensor]:
        """The score and the token of each row, greedy or drawn: [R] each, as `max` does."""
        drawn = [part.draw(adjusted) for part in self._random]
        if not self._has_greedy and len(drawn) == 1:
            return drawn[0]
        if self._has_greedy:
            best, token_ids = largest(adjusted)
        else:
            best = adjusted.new_empty(len(adjusted))
            token_ids = torch.empty(len(adjusted), dtype=torch.int64, device=adjusted.device)
        for part, (part_best, part_token_ids) in zip(self._random, drawn, strict=True):
            best[part.indices] = part_best
            token_ids[part.indices] = part_token_ids
        return best, token_ids

    def choose_by(
        self, loops: SamplingLoops, logits: Tensor, changes: Changes | None
    ) -> tuple[Tensor, Tensor]:
        """The same by compiled loops, of logits that are not adjusted; the same tokens."""
        positions = np.array([len(row.output_token_ids) for row in self.rows], np.int64)
        choices = loops.choose(
            logits.detach().to(torch.float32).contiguous().numpy(),
            self._columns,
            positions,
            Changes.none(len(self.rows)) if changes is None else changes,
        )
        best, token_ids = torch.from_numpy(choices.best), torch.from_numpy(choices.token_ids)
        if not choices.is_decided.all():
            rows = np.flatnonzero(~choices.is_decided).tolist()
            some = _Batch(
                [self.rows[row] for row in rows], self._vocab_size, self.device, self._adjustment_of
            )
            best[rows], token_ids[rows] = some.choose(adjusted_logits(logits[rows], some.changes()))
        return best, token_ids


def errors_of(best: Tensor) -> dict[int, str]:
    """By row, why no token can be had from it; `best` is the largest score of each, [R]."""
    # It is -inf when no token is left, and NaN when any logit is one.
    errors = {}
    scores: list[float] = best.tolist()
    if not all(score > -math.inf for score in scores):
        for row, value in enumerate(scores):
            if math.isnan(value):
                errors[row] = "the model's logits are not numbers (NaN)"
            elif value == -math.inf:
                errors[row] = (
                    "every token is barred: allowed_token_ids, bad_words, min_tokens and a "
                    "grammar together leave none"
                )
    return errors
