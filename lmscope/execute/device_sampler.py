"""DeviceSampler: tokens drawn where the logits are, without the host knowing them.

For rows that are greedy or have temperature, top-k, top-p and min_p; the rule is the Sampler's.
What looks at the tokens so far, or asks for log probabilities, is the Sampler's own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from lmscope_kernels.sampling import SamplingWorkspace, sample
from torch import Tensor

from lmscope.execute.device_inputs import Column, Turns
from lmscope.execute.logits_adjustment import LogitsAdjustment
from lmscope.execute.sampling_row import SamplingRow

__all__ = ["DeviceSampler"]

_ROW_STEP = 16
_LARGEST = torch.finfo(torch.float32).max


class DeviceSampler:
    """Buffers for at most `max_num_reqs` rows; parameters are copied when the rows change.

    batch_invariant    a row draws the same bits from its logits in any batch: logits are copied
                       into rows of one type and alignment, and where a row has a filter, the
                       kernels run that have all of them
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        turns: Turns,
        *,
        batch_invariant: bool = False,
    ) -> None:
        def column(dtype: torch.dtype) -> Column:
            return Column(max_num_reqs, dtype, device, turns)

        self._vocab_size = vocab_size
        self._is_invariant = batch_invariant
        self._workspace = SamplingWorkspace.allocate(max_num_reqs, vocab_size, device)
        self._temperature = column(torch.float32)
        self._top_k = column(torch.int32)
        self._top_p = column(torch.float32)
        self._min_p = column(torch.float64)
        self._seed = column(torch.int64)
        self._position = column(torch.int64)
        # Whose parameters the buffers hold, and who was asked about last.
        self._rows: tuple[SamplingRow, ...] = ()
        self._seen: tuple[SamplingRow, ...] = ()
        self._takes_seen = True
        self._has_top_k = self._has_top_p = self._has_min_p = False

    def takes(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether no row needs more than a draw from its logits."""
        if not _are_same(self._seen, rows):
            self._seen = tuple(rows)
            self._takes_seen = not any(
                row.params.logprobs is not None or LogitsAdjustment.is_needed(row) for row in rows
            )
        return self._takes_seen

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64, and the best score of each, [R] float32: NaN and -inf are errors.

        logits    [R, V]
        """
        num_rows = len(rows)
        if not _are_same(self._rows, rows):
            self._load(tuple(rows))
        if self._is_invariant:
            logits = _in_float32_rows(logits)
        score = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        tokens = sample(
            logits,
            self._temperature.device[:num_rows],
            self._top_k.device[:num_rows] if self._has_top_k else None,
            self._top_p.device[:num_rows] if self._has_top_p else None,
            self._min_p.device[:num_rows] if self._has_min_p else None,
            self._seed.device[:num_rows],
            self._position.load([len(row.output_token_ids) for row in rows]),
            workspace=self._workspace,
            score=score,
        )
        return tokens, score

    def _load(self, rows: tuple[SamplingRow, ...]) -> None:
        params = [row.params for row in rows]
        self._temperature.load(
            [0.0 if each.is_greedy else min(each.temperature, _LARGEST) for each in params]
        )
        top_k = [each.top_k if 0 < each.top_k < self._vocab_size else 0 for each in params]
        # A greedy row takes the largest logit whatever its filters are.
        drawn = [each for each in params if not each.is_greedy]
        self._has_top_k = any(0 < each.top_k < self._vocab_size for each in drawn)
        self._has_top_p = any(each.top_p < 1.0 for each in drawn)
        self._has_min_p = any(each.min_p > 0.0 for each in drawn)
        if self._is_invariant:
            has_filter = self._has_top_k or self._has_top_p or self._has_min_p
            self._has_top_k = self._has_top_p = self._has_min_p = has_filter
        if self._has_top_k:
            self._top_k.load(top_k)
        if self._has_top_p:
            self._top_p.load([each.top_p for each in params])
        if self._has_min_p:
            self._min_p.load([each.min_p for each in params])
        # All 64 bits of the seed, as int64 holds them.
        self._seed.load([_signed(row.seed) for row in rows])
        self._rows = rows


def _in_float32_rows(logits: Tensor) -> Tensor:
    """[R, V] float32 in rows that begin at multiples of 16; the logits where they are so."""
    num_rows, vocab_size = logits.shape
    is_fine = logits.stride(0) % _ROW_STEP == 0 and logits.data_ptr() % 16 == 0
    if logits.dtype == torch.float32 and is_fine:
        return logits
    padded = -(-vocab_size // _ROW_STEP) * _ROW_STEP
    rows = logits.new_empty(num_rows, padded, dtype=torch.float32)[:, :vocab_size]
    return rows.copy_(logits)


def _are_same(known: Sequence[SamplingRow], rows: Sequence[SamplingRow]) -> bool:
    return len(known) == len(rows) and all(map(operator.is_, known, rows))


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
