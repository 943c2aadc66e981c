"""The legend of a still picture: an entry for each mark that is drawn, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmscope_widgets.lettering import text_width
from lmscope_widgets.palette import light
from lmscope_widgets.raster import RGB, Canvas
from lmscope_widgets.step_log import StepBar
from lmscope_widgets.still_map import (
    EMPTY,
    EVICTED,
    HIT,
    IN_USE,
    KEPT,
    NULL,
    WRITTEN,
    Bytes,
    draw_cell,
)

__all__ = ["Legend"]

_LINE, _SWATCH, _GAP = 18, 6, 16
# Width of the scale of attention, and the ground of it that samples of blocks have.
_SCALE, _SAMPLE = 96, 5
# Above this many blocks a cell is too small for marks, or is a bin of many.
_MOST_CELLS = 10_000

_Draw = Callable[[Canvas, float, float], None]


@dataclass(frozen=True)
class _Mark:
    """A swatch of `width` by 12 pixels, and its words."""

    words: str
    draw: _Draw
    width: int


class Legend:
    """Marks of blocks, then marks of steps, in lines of at most `width` pixels.

    columns     None: the blocks are not drawn
    has_bands   whether shared blocks show a band per owner
    top         of blocks coloured by attention: the largest share, in words; None: by owner
    """

    def __init__(
        self,
        columns: Mapping[str, Bytes] | None,
        steps: Sequence[StepBar],
        width: int,
        has_bands: bool,
        top: str | None = None,
    ) -> None:
        marks = _block_marks(columns, has_bands, top is None) if columns else []
        if columns and top is not None:
            words = f"attention: 0 to {top} of the step, a quarter of that in the middle"
            marks.insert(0, _Mark(words, _draw_scale, _SCALE))
        self._lines = [
            *_in_lines(marks, width),
            *_in_lines(_step_marks(steps), width),
        ]

    @property
    def height(self) -> int:
        return _LINE * len(self._lines)

    def draw(self, canvas: Canvas, x: int, y: int) -> None:
        """Draw it with the top left corner at (x, y)."""
        for line in self._lines:
            at: float = x
            for mark in line:
                mark.draw(canvas, at, y)
                left = at + mark.width + _SWATCH
                at = canvas.text(left, y + 9.5, mark.words, 10, light().ink_soft) + _GAP
            y += _LINE


def _block_marks(columns: Mapping[str, Bytes], has_bands: bool, is_by_owner: bool) -> list[_Mark]:
    state, slots = columns["state"], columns["slot"]
    kinds = state & 0x0F
    has_cells = len(state) <= _MOST_CELLS
    used, kept = slots[kinds == IN_USE], slots[kinds == KEPT]
    slot = int(used[0]) if len(used) else 0

    def cell(**look: Any) -> _Draw:
        if not is_by_owner:
            look["ground"] = _SAMPLE if look["state"] & 0x0F == IN_USE else 0
        return lambda canvas, x, y: _draw_swatch(canvas, x, y, **look)

    drawn = [
        (len(used) > 0, "in use", cell(slot=slot, state=IN_USE)),
        (
            has_cells and bool((columns["ref"] > 1).any()),
            "shared",
            _draw_bands
            if has_bands and is_by_owner
            else cell(slot=slot, state=IN_USE, is_shared=True),
        ),
        (
            len(kept) > 0,
            "kept for reuse",
            cell(slot=int(kept[0]) if len(kept) else 0, state=KEPT),
        ),
        (bool((kinds == EMPTY).any()), "empty", cell(slot=0xFF, state=EMPTY)),
        (has_cells and bool((kinds == NULL).any()), "null", cell(slot=0xFF, state=NULL)),
    ]
    for flag, words in ((HIT, "just hit"), (EVICTED, "just evicted"), (WRITTEN, "written now")):
        is_drawn = has_cells and bool((state & flag).any())
        drawn.append((is_drawn, words, cell(slot=slot, state=IN_USE | flag, filled=0.6)))
    return [_Mark(words, draw, 22) for is_drawn, words, draw in drawn if is_drawn]


def _step_marks(bars: Sequence[StepBar]) -> list[_Mark]:
    palette = light()

    def box(colour: RGB) -> _Draw:
        return lambda canvas, x, y: canvas.rect(x, y, 12, 10, colour)

    def hatched(canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x, y, 12, 10, palette.trouble_tint)
        canvas.hatch(x, y, 12, 10, palette.recompute)

    def hollow(canvas: Canvas, x: float, y: float) -> None:
        canvas.frame(x, y, 12, 10, palette.cached)

    def pool(canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x, y + 3, 6, 7, palette.prefill)
        canvas.rect(x + 6, y + 3, 6, 7, palette.line)

    def tick(canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x + 5, y + 1, 1, 6, palette.trouble)

    def triangle(canvas: Canvas, x: float, y: float) -> None:
        canvas.marker(x + 5, y + 1, 8, palette.trouble)

    drawn: list[tuple[bool, str, _Draw]] = [
        (any(bar.decode for bar in bars), "decode", box(palette.decode)),
        (any(bar.prefill for bar in bars), "prefill", box(palette.prefill)),
        (any(bar.recompute for bar in bars), "computed again", hatched),
        (any(bar.cached for bar in bars), "from cache, free", hollow),
        (any(bar.used or bar.kept for bar in bars), "pool: used, kept", pool),
        (any(bar.evicted for bar in bars), "eviction", tick),
        (any(bar.preempted for bar in bars), "preempted", triangle),
    ]
    return [_Mark(words, draw, 12) for is_drawn, words, draw in drawn if is_drawn]


def _draw_swatch(canvas: Canvas, x: float, y: float, **look: Any) -> None:
    """A block of the size of a swatch."""
    cell = Canvas(24, 14, light().background, canvas.scale)
    draw_cell(cell, **look)
    top, left = round(y * canvas.scale), round(x * canvas.scale)
    height, width, _ = cell.pixels.shape
    canvas.pixels[top : top + height, left : left + width] = cell.pixels


def _draw_bands(canvas: Canvas, x: float, y: float) -> None:
    """A shared block with the bands of two owners."""
    for i, owner in enumerate(light().owners[:2]):
        canvas.rect(x + 11 * i, y, 11, 9, owner.tint)
        canvas.rect(x + 11 * i, y + 9, 11, 3, owner.edge)


def _draw_scale(canvas: Canvas, x: float, y: float) -> None:
    """All grounds of attention in a row."""
    grounds = light().attention
    for i, look in enumerate(grounds):
        canvas.rect(x + i * _SCALE / len(grounds), y, _SCALE / len(grounds), 12, look.ground)


def _in_lines(marks: Sequence[_Mark], width: int) -> list[list[_Mark]]:
    lines: list[list[_Mark]] = []
    room = 0.0
    for mark in marks:
        needed = mark.width + _SWATCH + text_width(mark.words, 10) + _GAP
        if not lines or needed > room:
            lines.append([])
            room = width
        lines[-1].append(mark)
        room -= needed
    return lines
