"""The block map of a still picture, from a cell with words to bins of a million blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmscope_widgets.lettering import knows, text_width
from lmscope_widgets.palette import NEUTRAL_SLOT, NO_SLOT, light
from lmscope_widgets.raster import Canvas, blend

__all__ = [
    "BY_OWNER",
    "EMPTY",
    "EVICTED",
    "HIT",
    "IN_USE",
    "KEPT",
    "NULL",
    "WRITTEN",
    "BlockMap",
    "draw_cell",
]

EMPTY, IN_USE, KEPT, NULL = 0, 1, 2, 3
# Instead of the number of a ground: none, the owner's.
BY_OWNER = 255
HIT, EVICTED, WRITTEN = 0x10, 0x20, 0x40

Bytes = npt.NDArray[np.uint8]

# (width, height) of a cell, largest first; the first that lets all blocks in is taken.
_CELLS = (
    (86, 46),
    (64, 42),
    (50, 33),
    (38, 27),
    (28, 20),
    (20, 16),
    (14, 12),
    (10, 10),
    (8, 8),
    (6, 6),
    (5, 5),
    (4, 4),
    (3, 3),
)
_WORDS_FROM = 54
_NAMES_FROM = 36
# A bin is a square of this many pixels.
_BIN = 8


@dataclass(frozen=True)
class _Grid:
    width: int
    height: int
    columns: int
    rows: int
    # blocks in a cell; more than one: bins
    share: int = 1


class BlockMap:
    """Draws the columns of a full frame into a rectangle of a canvas.

    cells       the frame's words for blocks, possibly none
    block_size  tokens that fit a block
    next_ids    the blocks that are handed out next, first one first
    slots       owner slot of each request that the frame lists
    labels      in cells that are large enough: 2 ids, names and text, 1 ids and names, 0 none
    grounds     by attention: of each block the number of its ground, 0 for none; None: by owner
    """

    def __init__(
        self,
        columns: Mapping[str, Bytes],
        cells: Sequence[Sequence[Any]],
        block_size: int,
        next_ids: Sequence[int],
        slots: Mapping[str, int],
        labels: int = 2,
        grounds: Bytes | None = None,
    ) -> None:
        self._slot = columns["slot"]
        self._state = columns["state"]
        self._ref = columns["ref"]
        self._fill = columns["fill"]
        self._words = {int(cell[0]): cell for cell in cells}
        # `fill` stops at what a byte holds.
        self._block_size = min(255, max(1, block_size))
        self._next = {block_id: place for place, block_id in enumerate(next_ids[:3], start=1)}
        self._slots = slots
        self._labels = labels
        self._palette = light()
        self._is_by_owner = grounds is None
        self._grounds = np.full_like(self._slot, BY_OWNER) if grounds is None else grounds

    @property
    def num_blocks(self) -> int:
        return len(self._state)

    def height(self, width: int, most: int) -> int:
        """Height in pixels that the map takes of at most `most`."""
        grid = self._grid(width, most)
        return grid.rows * grid.height

    def has_bands(self, width: int, most: int) -> bool:
        """Whether shared blocks show bands, as there is room and words that name the owners."""
        return bool(self._words) and self._grid(width, most).width >= _NAMES_FROM

    def draw(self, canvas: Canvas, x: int, y: int, width: int, most: int) -> None:
        """Draw all blocks with the top left corner at (x, y)."""
        grid = self._grid(width, most)
        if grid.share > 1:
            self._draw_bins(canvas, x, y, grid)
            return
        self._draw_cells(canvas, x, y, grid)
        if grid.width < _NAMES_FROM:
            return
        for block_id in range(self.num_blocks):
            row, column = divmod(block_id, grid.columns)
            left, top = x + column * grid.width, y + row * grid.height
            self._band(canvas, block_id, left, top, grid)
            if self._labels:
                self._letter(canvas, block_id, left, top, grid)

    def _grid(self, width: int, most: int) -> _Grid:
        count = self.num_blocks
        for cell_width, cell_height in _CELLS:
            columns = max(1, width // cell_width)
            rows = -(-count // columns)
            if rows * cell_height <= most:
                return _Grid(cell_width, cell_height, min(columns, max(1, count)), max(1, rows))
        columns, rows = width // _BIN, most // _BIN
        share = -(-count // (columns * rows))
        return _Grid(_BIN, _BIN, columns, -(-count // (columns * share)), share)

    def _draw_cells(self, canvas: Canvas, x: int, y: int, grid: _Grid) -> None:
        """Draw each kind of cell once and copy it to all blocks that look like it."""
        steps = 8 if grid.width >= 14 else 1
        full = self._fill.astype(np.uint32) * steps
        # Rounded up; unsigned numbers cannot be negated for that.
        filled = np.minimum(steps, (full + self._block_size - 1) // self._block_size)
        key = (
            self._slot.astype(np.uint32)
            | (self._state.astype(np.uint32) << 8)
            | (np.minimum(self._ref, 2).astype(np.uint32) << 16)
            | (filled << 20)
            | (self._grounds.astype(np.uint32) << 24)
        )
        looks, index = np.unique(key, return_inverse=True)
        scale = canvas.scale
        tiles = np.empty(
            (len(looks) + 1, grid.height * scale, grid.width * scale, 3), dtype=np.uint8
        )
        for i, look in enumerate(looks.tolist()):
            tile = Canvas(grid.width, grid.height, self._palette.background, scale)
            draw_cell(
                tile,
                slot=look & 0xFF,
                state=(look >> 8) & 0xFF,
                is_shared=(look >> 16) & 0xF > 1,
                filled=((look >> 20) & 0xF) / steps,
                ground=look >> 24,
            )
            tiles[i] = tile.pixels
        tiles[len(looks)] = self._palette.background
        places = np.full(grid.rows * grid.columns, len(looks))
        places[: len(index)] = index
        _paste(canvas, x, y, tiles[places], grid)

    def _letter(self, canvas: Canvas, block_id: int, x: int, y: int, grid: _Grid) -> None:
        """Write id, owner and text into a cell, and its place among those handed out next."""
        palette = self._palette
        words = self._words.get(block_id)
        state = int(self._state[block_id]) & 0x0F
        owners = [str(owner) for owner in words[1]] if words else []
        right, foot = x + grid.width - 7, y + grid.height - 7
        is_in_use = state == IN_USE
        ink = palette.ink if is_in_use else palette.ink_soft
        if 0 < self._grounds[block_id] < BY_OWNER:
            ink = palette.attention[self._grounds[block_id] - 1].text
        label = "0 null" if state == NULL else str(block_id)
        size = 9.5 if grid.width >= 50 else 8.5
        end = canvas.text(x + 5, y + 12, label, size, ink)
        if is_in_use and len(owners) > 1:
            name = f"×{len(owners)}"
        elif is_in_use and owners:
            name = owners[0]
        elif state == KEPT and words and words[3] is not None:
            name = str(words[3])
        else:
            name = ""
        weight = 1.5 if is_in_use else 1.0
        if name and len(name) < 64 and all(map(knows, name)):
            width = text_width(name, size, weight)
            if right - width >= end + 4:
                canvas.text(right - width, y + 12, name, size, ink, weight)
            elif grid.height >= 32:
                short = _cut(name, grid.width - 10, size)
                canvas.text(x + 5, y + 23, short, size, ink, weight)
        if self._labels > 1 and words and words[2] and grid.width >= _WORDS_FROM:
            text = " ".join(str(words[2]).split())
            place = self._next.get(block_id)
            room = grid.width - 14 - (14 if place else 0)
            if text and sum(map(knows, text)) * 2 > len(text):
                canvas.text(x + 5, y + 25, _cut(text, room, 9.5), 9.5, ink)
        if block_id in self._next:
            losing = state == KEPT
            colour = palette.trouble_text if losing else palette.ink_soft
            label = str(self._next[block_id])
            canvas.text(right - text_width(label, 9.5, 1.5), foot, label, 9.5, colour, 1.5)

    def _band(self, canvas: Canvas, block_id: int, x: int, y: int, grid: _Grid) -> None:
        """A shared block gets vertical bands, one per owner, inside and along its foot."""
        state = int(self._state[block_id])
        words = self._words.get(block_id)
        owners = words[1][:8] if words else ()
        if state & 0x0F != IN_USE or len(owners) < 2:
            return
        width, height, foot = grid.width - 2, grid.height - 2, _foot(grid.height)
        band = width / len(owners)
        for i, name in enumerate(owners):
            owner = self._palette.owner(self._slots.get(str(name), NEUTRAL_SLOT))
            if self._is_by_owner:
                canvas.rect(x + i * band, y, band, height - foot, owner.tint)
            canvas.rect(x + i * band, y + height - foot, band, foot, owner.edge)
            if i and self._is_by_owner:
                canvas.rect(x + i * band, y, 0.5, height, self._palette.background)
        _draw_marks(canvas, x, y, width, height, state)

    def _draw_bins(self, canvas: Canvas, x: int, y: int, grid: _Grid) -> None:
        """Each bin is a stack of its shares of states in the hue of most of its blocks."""
        palette, scale = self._palette, canvas.scale
        count = grid.rows * grid.columns
        padded = np.full(count * grid.share, 0xFF, np.uint8)
        padded[: self.num_blocks] = self._state & 0x0F
        state = padded.reshape(count, grid.share)
        inside = (state != 0xFF).sum(axis=1)
        used = (state == IN_USE).sum(axis=1)
        kept = (state == KEPT).sum(axis=1)
        slot = _majority(self._slot, count, grid.share)
        size = grid.width * scale
        inner = size - scale
        look = [palette.owner(owner) for owner in range(256)]
        hues = np.array([owner.edge for owner in look], np.uint8)
        tints = np.array([owner.tint for owner in look], np.uint8)
        level = (np.arange(inner)[::-1] + 0.5) / inner
        share = np.maximum(inside, 1)[:, None]
        is_used = level[None, :] < used[:, None] / share
        is_kept = ~is_used & (level[None, :] < (used + kept)[:, None] / share)
        stack = np.empty((count, inner, 3), np.uint8)
        stack[:] = palette.line_soft
        stack = np.where(is_kept[:, :, None], tints[slot][:, None, :], stack)
        stack = np.where(is_used[:, :, None], hues[slot][:, None, :], stack)
        if not self._is_by_owner:
            stack[:] = self._bin_grounds(count, grid.share)[:, None, :]
        stack[inside == 0] = palette.background
        tiles = np.empty((count, size, size, 3), np.uint8)
        tiles[:] = palette.background
        tiles[:, :inner, :inner] = stack[:, :, None, :]
        _paste(canvas, x, y, tiles, grid)

    def _bin_grounds(self, count: int, share: int) -> Bytes:
        """Of each bin the colour of its most attended block: [count, 3]."""
        padded = np.zeros(count * share, np.uint8)
        padded[: self.num_blocks] = self._grounds
        colours = [self._palette.line_soft, *(look.ground for look in self._palette.attention)]
        most: Bytes = padded.reshape(count, share).max(axis=1)
        found: Bytes = np.array(colours, np.uint8)[most]
        return found


def draw_cell(
    canvas: Canvas,
    *,
    slot: int,
    state: int,
    is_shared: bool = False,
    filled: float = 1.0,
    ground: int = BY_OWNER,
) -> None:
    """Fill a canvas of a cell's size, gap included, with one block.

    filled   share of the block's slots that hold a token
    ground   number of the ground by attention, 0 for none
    """
    palette = light()
    gap = 2 if canvas.width >= 20 else 1
    width, height = canvas.width - gap, canvas.height - gap
    owner = palette.owner(slot)
    kind = state & 0x0F
    if ground != BY_OWNER:
        owner = replace(owner, edge=palette.line, hue=palette.line)
    if 0 < ground < BY_OWNER:
        canvas.rect(0, 0, width, height, palette.attention[ground - 1].ground)
    if kind == IN_USE:
        is_written = bool(state & WRITTEN)
        _draw_in_use(canvas, width, height, slot, is_shared, filled, is_written, ground)
    elif kind == KEPT:
        if width >= 9:
            line = 1.5 if width >= 20 else 1.0
            canvas.dashes(0, 0, width, height, owner.edge, line, 3.0 if width >= 20 else 2.0)
        elif width >= 4:
            canvas.frame(0, 0, width, height, blend(palette.background, owner.edge, 0.6))
        else:
            canvas.rect(0, 0, width, height, blend(palette.background, owner.hue, 0.3))
    elif kind == NULL:
        canvas.frame(0, 0, width, height, palette.line)
        if width >= 8:
            canvas.cross(0, 0, width, height, palette.line)
    elif width >= 5:
        canvas.frame(0, 0, width, height, palette.line_soft)
    else:
        canvas.rect(0, 0, width, height, palette.line_soft)
    _draw_marks(canvas, 0, 0, width, height, state)


def _draw_in_use(
    canvas: Canvas,
    width: int,
    height: int,
    slot: int,
    is_shared: bool,
    filled: float,
    is_written: bool,
    ground: int,
) -> None:
    palette = light()
    owner = palette.owner(slot)
    is_by_owner = ground == BY_OWNER
    if width < 12 and not is_by_owner:
        if not ground:
            canvas.rect(0, 0, width, height, palette.line_soft)
        elif is_shared and height >= 4:
            canvas.rect(0, 0, width, 1, palette.attention[ground - 1].text)
        return
    if width < 12:
        # Too small for patterns: the second eight are a shade darker, the third grey.
        hue = (owner.edge, blend(owner.edge, palette.ink, 0.4), palette.neutral.hue)[owner.ring]
        canvas.rect(0, 0, width, height, hue)
        if is_shared and height >= 4:
            canvas.rect(0, 0, width, 1, palette.ink)
        return
    foot = _foot(canvas.height)
    if is_by_owner:
        canvas.rect(0, 0, width, height - foot, owner.tint)
        if owner.ring == 1:
            canvas.hatch(0, 0, width, height - foot, blend(owner.tint, owner.hue, 0.3))
        elif owner.ring == 2:
            canvas.dots(0, 0, width, height - foot, blend(owner.tint, owner.hue, 0.5))
    elif not ground:
        canvas.frame(0, 0, width, height, palette.line)
    canvas.rect(0, height - foot, width, foot, palette.raised)
    canvas.rect(0, height - foot, width * filled, foot, owner.edge)
    if is_written and filled:
        written = max(2.0, min(width * filled, width / 8))
        canvas.rect(width * filled - written, height - foot, written, foot, palette.ink)
    if is_shared and width < _NAMES_FROM:
        canvas.rect(0, 0, width, 2, palette.ink)


def _draw_marks(canvas: Canvas, x: int, y: int, width: int, height: int, state: int) -> None:
    """What happened to a block in this step."""
    palette = light()
    if state & EVICTED:
        canvas.corner(x, y, min(10.0, max(2.0, width * 0.4)), palette.trouble)
    if state & HIT:
        canvas.frame(x, y, width, height, palette.ink, 2.0 if width >= 14 else 1.0)


def _foot(height: int) -> int:
    return 4 if height >= 27 else 3


def _majority(slot: Bytes, count: int, share: int) -> npt.NDArray[np.intp]:
    """For each run of `share` blocks the slot that most of those with an owner have."""
    best = np.zeros(count, np.int64)
    winner = np.full(count, NO_SLOT, np.intp)
    padded = np.full(count * share, NO_SLOT, np.uint8)
    padded[: len(slot)] = slot
    rows = padded.reshape(count, share)
    for owner in np.unique(slot).tolist():
        if owner == NO_SLOT:
            continue
        votes = (rows == owner).sum(axis=1)
        better = votes > best
        best[better] = votes[better]
        winner[better] = owner
    return winner


def _paste(canvas: Canvas, x: int, y: int, tiles: Bytes, grid: _Grid) -> None:
    """Put tiles [rows * columns, height, width, 3] side by side onto the canvas."""
    _, height, width, _ = tiles.shape
    picture = (
        tiles.reshape(grid.rows, grid.columns, height, width, 3)
        .swapaxes(1, 2)
        .reshape(grid.rows * height, grid.columns * width, 3)
    )
    top, left = y * canvas.scale, x * canvas.scale
    canvas.pixels[top : top + picture.shape[0], left : left + picture.shape[1]] = picture


def _cut(text: str, width: float, size: float) -> str:
    """As much of a text as fits, with an ellipsis where it was cut."""
    text = text[:64]
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"
