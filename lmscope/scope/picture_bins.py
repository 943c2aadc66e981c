"""Bins: a pool too large to be told block by block, as counts of neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lmscope.scope.request_view import NO_SLOT

__all__ = ["BIN_COLUMNS", "Bins"]

BIN_COLUMNS = ("used", "kept", "slot", "flags")
"""Per bin: blocks in use and kept, u16; owner slot of most of them and flags, u8."""

_MOST_BINS = 2048
_IN_USE, _KEPT = 1, 2
_FLAGS = 0x70
_SHARED = 0x80

Bytes = npt.NDArray[np.uint8]


class Bins:
    """The bins over the columns of a pool, which somebody else keeps up to date.

    size    blocks in a bin; the last one may have fewer
    count   bins
    """

    def __init__(self, columns: Mapping[str, Bytes]) -> None:
        self._blocks = columns
        num_blocks = len(columns["state"])
        self.size = -(-num_blocks // _MOST_BINS)
        self.count = -(-num_blocks // self.size)
        self._columns: dict[str, npt.NDArray[Any]] = {
            "used": np.zeros(self.count, "<u2"),
            "kept": np.zeros(self.count, "<u2"),
            "slot": np.full(self.count, NO_SLOT, np.uint8),
            "flags": np.zeros(self.count, np.uint8),
        }

    def update(self, block_ids: Iterable[int]) -> npt.NDArray[Any]:
        """Count the bins of these blocks anew; returns which bins, ascending, u32."""
        ids = np.fromiter(block_ids, np.int64)
        bins = np.unique(ids // self.size).astype("<u4")
        used, kept, slots, flags = (self._columns[name] for name in BIN_COLUMNS)
        for number in bins.tolist():
            part = slice(number * self.size, (number + 1) * self.size)
            state = self._blocks["state"][part]
            kinds = np.bincount(state & 0x0F, minlength=4)
            used[number], kept[number] = kinds[_IN_USE], kinds[_KEPT]
            flags[number] = np.bitwise_or.reduce(state) & _FLAGS
            if (self._blocks["ref"][part] > 1).any():
                flags[number] |= _SHARED
            slot = self._blocks["slot"][part]
            owned = slot[slot != NO_SLOT]
            slots[number] = np.bincount(owned).argmax() if len(owned) else NO_SLOT
        return bins

    def columns(self, bins: npt.NDArray[Any] | None = None) -> tuple[npt.NDArray[Any], ...]:
        """The columns of these bins, or of all, as copies."""
        if bins is None:
            return tuple(self._columns[name].copy() for name in BIN_COLUMNS)
        return tuple(self._columns[name][bins] for name in BIN_COLUMNS)
