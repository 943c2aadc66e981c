"""Attention in words: shares, and the blocks that get most of it."""

from __future__ import annotations

import heapq

from lmscope.scope.view import EngineView

__all__ = ["most_attended", "percent"]


def percent(share: float) -> str:
    """A share of 1 with one decimal, as the page writes it."""
    return "below 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"


def most_attended(view: EngineView, count: int = 5) -> list[tuple[int, float, tuple[str, ...]]]:
    """The blocks that get most of the last step's attention: id, share, who holds or stored them.

    An empty list where nobody measured it.
    """
    listed = heapq.nsmallest(count, view.attention.items(), key=lambda pair: (-pair[1], pair[0]))
    found = []
    for block_id, share in listed:
        block = view.blocks[block_id]
        stored_by = () if block.stored_by is None else (block.stored_by,)
        found.append((block_id, share, tuple(block.owners) or stored_by))
    return found
