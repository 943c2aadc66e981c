"""RandomRows: the rows of a batch that draw their tokens, and what their parameters ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from lmscope_kernels.sampling_cpu import RowColumns
from torch import Tensor

from lmscope.execute.logits_filters import filter_min_p, filter_top_k, filter_top_p
from lmscope.execute.random_draws import draw_tokens
from lmscope.execute.sampling_row import SamplingRow
from lmscope.sampling_params import SamplingParams

__all__ = ["RandomRows", "in_parts", "random_rows", "row_columns", "rows_of"]

# So many on a CPU, where what is made of them then stays in its cache, in memory that is there
# already: 64 rows of 49,152 in one go take twice as long.
_MOST_ROWS_ON_CPU = 32
_FLOAT32 = np.finfo(np.float32)
_MASK_64 = (1 << 64) - 1


class _Wanted(NamedTuple):
    """What a random row asks for; None: no such filter."""

    temperature: float
    log_min_p: float | None
    top_k: int | None
    top_p: float | None

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> _Wanted:
        return cls(
            # Beyond float32 it would be infinite, and a barred token's -inf / inf is NaN.
            min(params.temperature, float(_FLOAT32.max)),
            math.log(params.min_p) if params.min_p else None,
            params.top_k if 0 < params.top_k < vocab_size else None,
            params.top_p if np.float32(params.top_p) < 1 else None,
        )


class _Filter(NamedTuple):
    """A filter, its rows among the random ones (None: all of them) and a value for each."""

    function: Callable[[Tensor, Tensor], None]
    rows: list[int] | None
    values: Tensor


class RandomRows:
    """Rows that are processed and drawn together; no state of its own.

    indices    their places in the batch, ascending
    rows       themselves
    """

    def __init__(
        self,
        indices: Sequence[int],
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.indices = list(indices)
        self._rows = list(rows)
        wanted = [_Wanted.of(row.params, vocab_size) for row in rows]
        temperatures = [each.temperature for each in wanted]
        self._temperature = (
            torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
            if any(temperature != 1.0 for temperature in temperatures)
            else None
        )
        self._filters: list[_Filter] = []
        for function, dtype, values in (
            (filter_min_p, torch.float32, [each.log_min_p for each in wanted]),
            (filter_top_k, torch.int64, [each.top_k for each in wanted]),
            (filter_top_p, torch.float32, [each.top_p for each in wanted]),
        ):
            chosen = [i for i, value in enumerate(values) if value is not None]
            if chosen:
                column = torch.tensor([values[i] for i in chosen], dtype=dtype, device=device)
                places = None if len(chosen) == len(rows) else chosen
                self._filters.append(_Filter(function, places, column))

    def process(self, adjusted: Tensor) -> Tensor:
        """What they draw from: [len(indices), V].

        adjusted    [R, V] float32, of the whole batch; it is not changed, but may be returned
        """
        logits = rows_of(adjusted, self.indices)
        if self._temperature is not None:
            logits = logits / self._temperature
        elif self._filters:
            logits = logits.clone()
        for each in self._filters:
            if each.rows is None:
                each.function(logits, each.values)
            else:
                some = logits[each.rows]
                each.function(some, each.values)
                logits[each.rows] = some
        return logits

    def draw(self, adjusted: Tensor) -> tuple[Tensor, Tensor]:
        """The score and the token of each: [len(indices)] each, as `max` does."""
        return draw_tokens(
            self.process(adjusted),
            [row.seed for row in self._rows],
            [len(row.output_token_ids) for row in self._rows],
        )


def random_rows(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
) -> list[RandomRows]:
    """Those of a batch that are not greedy, in parts."""
    indices = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    return [
        RandomRows(part, [rows[i] for i in part], vocab_size, device)
        for part in in_parts(indices, device)
    ]


def row_columns(rows: Sequence[SamplingRow], vocab_size: int) -> RowColumns:
    """The rows of a batch, greedy ones too, as the compiled loops read them."""
    temperature, log_min_p, top_k, top_p = [], [], [], []
    for row in rows:
        wanted = _Wanted.of(row.params, vocab_size)
        # One that float32 has no number for makes infinities in both ways.
        least = 0.0 if row.params.is_greedy else float(_FLOAT32.smallest_subnormal)
        temperature.append(max(wanted.temperature, least))
        log_min_p.append(-math.inf if wanted.log_min_p is None else wanted.log_min_p)
        top_k.append(wanted.top_k or 0)
        top_p.append(1.0 if wanted.top_p is None else wanted.top_p)
    return RowColumns(
        np.array(temperature, np.float32),
        np.array(log_min_p, np.float32),
        np.array(top_k, np.int64),
        np.array(top_p, np.float32),
        np.array([row.seed & _MASK_64 for row in rows], np.uint64),
    )


def in_parts(indices: list[int], device: torch.device) -> list[list[int]]:
    """Rows of a batch, as many together as the device does quickly."""
    most = _MOST_ROWS_ON_CPU if device.type == "cpu" else max(1, len(indices))
    return [indices[start : start + most] for start in range(0, len(indices), most)]


def rows_of(table: Tensor, indices: list[int]) -> Tensor:
    """Some rows of a table, ascending; without a copy where they follow one another."""
    first, last = indices[0], indices[-1] + 1
    return table[first:last] if last - first == len(indices) else table[indices]
