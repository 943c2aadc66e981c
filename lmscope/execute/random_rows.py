"""RandomRows: the rows of a batch that draw their tokens, and what their parameters ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmscope.execute.logits_filters import filter_min_p, filter_top_k, filter_top_p
from lmscope.execute.random_draws import draw_tokens
from lmscope.execute.sampling_row import SamplingRow

__all__ = ["RandomRows", "in_parts", "random_rows", "rows_of"]

# So many on a CPU, where what is made of them then stays in its cache, in memory that is there
# already: 64 rows of 49,152 in one go take twice as long.
_MOST_ROWS_ON_CPU = 32


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
        params = [row.params for row in rows]
        # Beyond float32 it would be infinite, and a barred token's -inf / inf is NaN.
        largest = torch.finfo(torch.float32).max
        temperatures = [min(each.temperature, largest) for each in params]
        self._temperature = (
            torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
            if any(temperature != 1.0 for temperature in temperatures)
            else None
        )
        self._filters: list[_Filter] = []
        for function, dtype, values in (
            (
                filter_min_p,
                torch.float32,
                [math.log(each.min_p) if each.min_p else None for each in params],
            ),
            (
                filter_top_k,
                torch.int64,
                [each.top_k if 0 < each.top_k < vocab_size else None for each in params],
            ),
            (
                filter_top_p,
                torch.float32,
                [each.top_p if each.top_p < 1.0 else None for each in params],
            ),
        ):
            chosen = [i for i, value in enumerate(values) if value is not None]
            if chosen:
                column = torch.tensor([values[i] for i in chosen], dtype=dtype, device=device)
                places = None if len(chosen) == len(params) else chosen
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


def in_parts(indices: list[int], device: torch.device) -> list[list[int]]:
    """Rows of a batch, as many together as the device does quickly."""
    most = _MOST_ROWS_ON_CPU if device.type == "cpu" else max(1, len(indices))
    return [indices[start : start + most] for start in range(0, len(indices), most)]


def rows_of(table: Tensor, indices: list[int]) -> Tensor:
    """Some rows of a table, ascending; without a copy where they follow one another."""
    first, last = indices[0], indices[-1] + 1
    return table[first:last] if last - first == len(indices) else table[indices]
