"""Attention in a still picture: how dark each block is, and which five get most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lmscope.scope.attention_words import percent
from lmscope_widgets.palette import NEUTRAL_SLOT, light
from lmscope_widgets.still_map import IN_USE, Bytes

__all__ = ["grounds", "most_attended", "top_words"]

_MOST_LEVEL = 255
_MOST_LISTED = 5


def grounds(frame: Mapping[str, Any], num_blocks: int) -> Bytes | None:
    """For each block the number of its ground, from 1, and 0 for next to no attention.

    None where nobody measured it. As in the page, they go with the square root of the share.
    """
    mass = frame.get("mass")
    if not mass:
        return None
    levels = np.zeros(num_blocks)
    levels[mass["of"][::2]] = mass["of"][1::2]
    last = len(light().attention) - 1
    places = 1 + np.floor(last * np.sqrt(levels / _MOST_LEVEL) + 0.5)
    return np.where(levels > 0, places, 0).astype(np.uint8)


def top_words(frame: Mapping[str, Any]) -> str:
    """What the darkest ground stands for."""
    return percent(float(frame["mass"]["top"]))


def most_attended(
    frame: Mapping[str, Any], columns: Mapping[str, Bytes]
) -> Iterator[tuple[int, str, Sequence[str]]]:
    """The five blocks that get most attention: id, share in words, who holds them."""
    mass = frame.get("mass")
    if not mass:
        return
    pairs = sorted(
        zip(mass["of"][::2], mass["of"][1::2], strict=True), key=lambda pair: (-pair[1], pair[0])
    )
    words = {int(cell[0]): cell for cell in frame.get("cells", ())}
    # In a pool too large for words, a hue says whose a block is.
    names = {int(row["slot"]): str(row["id"]) for row in frame["rows"]}
    for block_id, level in pairs[:_MOST_LISTED]:
        cell, slot = words.get(block_id), int(columns["slot"][block_id])
        is_held = int(columns["state"][block_id]) & 0x0F == IN_USE
        owners: list[str] = []
        if cell is not None:
            owners = [str(owner) for owner in cell[1]] if is_held else [str(cell[3] or "–")]
        elif slot < NEUTRAL_SLOT and slot in names:
            owners = [names[slot]]
        yield block_id, percent(float(mass["top"]) * level / _MOST_LEVEL), owners
