"""Sampler: from logits to one token per request, in the order of vLLM's pipeline.

    logits      as the model gave them, a grammar's mask already applied
    adjusted    float32, after LogitsAdjustment: allowed tokens, bad words, min_tokens,
                logit_bias, penalties. Greedy requests take the largest of these.
    processed   after temperature, min_p, top-k and top-p. The others draw from these.

Steps that no request in the batch needs are left out; a batch of plain greedy requests is
one pass over the logits. A row gives the same token alone and in any batch, bit for bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from lmscope.boundary import LogprobsLists
from lmscope.checks import nearest
from lmscope.execute.largest import largest
from lmscope.execute.logits_adjustment import LogitsAdjustment
from lmscope.execute.random_rows import in_parts, random_rows, rows_of
from lmscope.execute.sampling_row import SamplingRow
from lmscope.execute.token_logprobs import gather_logprobs

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

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """One token for each row; neither the logits nor the rows are changed.

        logits  [R, V] any floating type, row i for rows[i]
        """
        assert logits.shape == (len(rows), self.vocab_size)
        batch = self._batch_of(rows, logits.device)
        if batch.is_plain():
            return _output(*largest(logits), logprobs=[None] * len(rows))

        adjusted = batch.adjust(logits)
        best, token_ids = batch.choose(adjusted)
        logprobs = self._logprobs(batch, logits, adjusted, token_ids)
        return _output(best, token_ids, logprobs)

    @torch.inference_mode()
    def process(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """What `sample` draws from, or for a greedy row takes the largest of: [R, V] float32.

        It may be the logits themselves, so the caller must not change it.
        """
        assert logits.shape == (len(rows), self.vocab_size)
        batch = self._batch_of(rows, logits.device)
        return batch.process(batch.adjust(logits))

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> LogprobsLists:
        """Raw log probabilities of the prompt tokens that follow the given positions.

        logits   [N, V], row i computed from the prompt up to the token before targets[i]
        targets  [N] prompt token ids
        k        as in `gather_logprobs`
        """
        token_ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        return self._gather(self._log_softmax(logits), token_ids, k)

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Of each row, in float32."""
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    def _gather(self, values: Tensor, token_ids: Tensor, k: int) -> LogprobsLists:
        return gather_logprobs(values, token_ids, k)

    def _batch_of(self, rows: Sequence[SamplingRow], device: torch.device) -> _Batch:
        """What is known of these rows, from the step before while they are the same."""
        batch = self._batch
        if (
            batch is None
            or batch.device != device
            or len(batch.rows) != len(rows)
            or not all(map(operator.is_, batch.rows, rows))
        ):
            batch = self._batch = _Batch(rows, self.vocab_size, device)
        return batch

    def _logprobs(
        self, batch: _Batch, logits: Tensor, adjusted: Tensor, token_ids: Tensor
    ) -> list[LogprobsLists | None]:
        lists: list[LogprobsLists | None] = [None] * len(batch.rows)
        if not batch.rows_by_num_logprobs:
            return lists
        is_raw = self.logprobs_mode.startswith("raw")
        reported = logits if is_raw else batch.process(adjusted)
        for k, all_rows in batch.rows_by_num_logprobs.items():
            for rows in in_parts(all_rows, batch.device):
                values = rows_of(reported, rows).to(torch.float32)
                if self.logprobs_mode.endswith("logprobs"):
                    values = self._log_softmax(values)
                columns = self._gather(values, rows_of(token_ids, rows), k)
                for i, row in enumerate(rows):
                    lists[row] = LogprobsLists(
                        columns.logprob_token_ids[i : i + 1],
                        columns.logprobs[i : i + 1],
                        columns.sampled_token_ranks[i : i + 1],
                    )
        return lists


class _Batch:
    """What the parameters of some rows ask for, column by column; no state of its own."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> None:
        self.rows = tuple(rows)
        self.device = device
        self.adjustments = [
            (i, LogitsAdjustment(row, vocab_size, device))
            for i, row in enumerate(rows)
            if LogitsAdjustment.is_needed(row)
        ]
        self.rows_by_num_logprobs: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row.params.logprobs is not None:
                self.rows_by_num_logprobs.setdefault(row.params.logprobs, []).append(i)
        self.random = random_rows(rows, vocab_size, device)
        self._has_greedy = any(row.params.is_greedy for row in rows)

    def is_plain(self) -> bool:
        """Whether the largest logits are all that is asked for in this step."""
        is_due = any(adjustment.is_due() for _, adjustment in self.adjustments)
        return not (is_due or self.random or self.rows_by_num_logprobs)

    def adjust(self, logits: Tensor) -> Tensor:
        """[R, V] float32; `logits` is not changed, but may be what is returned."""
        due = [(row, adjustment) for row, adjustment in self.adjustments if adjustment.is_due()]
        adjusted = logits.to(torch.float32, copy=bool(due))
        for row, adjustment in due:
            adjustment.apply(adjusted[row])
        return adjusted

    def process(self, adjusted: Tensor) -> Tensor:
        """[R, V]: what random rows draw from, adjusted logits for greedy ones.

        `adjusted` is not changed, but may be what is returned.
        """
        if not self.random:
            return adjusted
        if not self._has_greedy and len(self.random) == 1:
            return self.random[0].process(adjusted)
        both = adjusted.clone()
        for part in self.random:
            both[part.indices] = part.process(adjusted)
        return both

    def choose(self, adjusted: Tensor) -> tuple[Tensor, Tensor]:
        """The score and the token of each row, greedy or drawn: [R] each, as `max` does."""
        drawn = [part.draw(adjusted) for part in self.random]
        if not self._has_greedy and len(drawn) == 1:
            return drawn[0]
        if self._has_greedy:
            best, token_ids = largest(adjusted)
        else:
            best = adjusted.new_empty(len(adjusted))
            token_ids = torch.empty(len(adjusted), dtype=torch.int64, device=adjusted.device)
        for part, (part_best, part_token_ids) in zip(self.random, drawn, strict=True):
            best[part.indices] = part_best
            token_ids[part.indices] = part_token_ids
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


def _output(best: Tensor, token_ids: Tensor, logprobs: list[LogprobsLists | None]) -> SamplerOutput:
    return SamplerOutput(token_ids.tolist(), logprobs, errors_of(best))
