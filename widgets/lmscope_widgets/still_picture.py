"""The still picture of a run as one PNG: title, strip of steps, block map, legend.

It is drawn from a full frame (docs/picture.md) and the log of steps, on a white ground of
its own, 800 pixels wide at two device pixels each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmscope_widgets.lettering import knows, text_width
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
    BlockMap,
    Bytes,
    draw_cell,
)

__all__ = ["WIDTH", "counts", "draw_picture", "title"]

WIDTH = 800
_MARGIN = 12
_INSIDE = WIDTH - 2 * _MARGIN
_LABELS = 78
_BUDGET, _CACHED, _POOL, _WAITING = 56, 20, 22, 16
_MAP_MOST = 400


def draw_picture(
    frame: Mapping[str, Any],
    columns: Mapping[str, Bytes],
    steps: Sequence[StepBar],
    *,
    scale: int = 2,
    shades: int = 2,
    labels: int = 2,
) -> bytes:
    """The picture as a PNG file.

    frame     the header of a full frame
    columns   its columns slot, state, ref and fill, one entry per block
    steps     bars of the steps since the start
    scale     device pixels per pixel
    shades    shades at the edge of a letter
    labels    in blocks that are large enough: 2 ids, names and text, 1 ids and names, 0 none

    The last three are what to give up for a smaller file.
    """
    drawing = _Drawing(frame, columns, steps, labels)
    canvas = Canvas(WIDTH, drawing.height(), light().background, scale, shades)
    drawing.draw(canvas)
    return canvas.png()


def title(frame: Mapping[str, Any]) -> str:
    """What is shown: model, pool, budget, step and phase."""
    info = frame["info"]
    return (
        f"{_short(info['model'], 120)} · {info['num_blocks']:,} blocks of "
        f"{info['block_size']} tokens · budget {info['max_num_batched_tokens']:,} · "
        f"step {frame['step']:,}, {frame['phase']}"
    )


def counts(frame: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of the header, each with its word."""
    stat, info = frame["stat"], frame["info"]
    prompt = stat["prompt_tokens"]
    share = f"{100 * stat['cached_tokens'] / prompt:.0f} %" if prompt else "–"
    return [
        (f"{stat['used']:,}/{info['num_blocks'] - 1:,}", "blocks used"),
        (f"{stat['kept']:,}", "kept for reuse"),
        (f"{stat['running']:,}", "running"),
        (f"{stat['waiting']:,}", "waiting"),
        (f"{stat['finished']:,}", "finished"),
        (share, "from cache"),
        (f"{stat['preemptions']:,}", _plural(stat["preemptions"], "preemption")),
        (f"{stat['evictions']:,}", _plural(stat["evictions"], "eviction")),
    ]


@dataclass(frozen=True)
class _Mark:
    """An entry of the legend: a swatch of `width` by 12 pixels and its words."""

    words: str
    draw: Callable[[Canvas, float, float], None]
    width: int


class _Drawing:
    def __init__(
        self,
        frame: Mapping[str, Any],
        columns: Mapping[str, Bytes],
        steps: Sequence[StepBar],
        labels: int,
    ) -> None:
        self._frame = frame
        self._columns = columns
        self._steps = steps
        self._palette = light()
        self._next = [int(block_id) for block_id in frame.get("next", ())]
        self._slots = {str(row["id"]): int(row["slot"]) for row in frame["rows"]}
        self._map = BlockMap(
            columns,
            frame.get("cells", ()),
            int(frame["info"]["block_size"]),
            self._next,
            self._slots,
            labels,
        )
        self._names = self._named_requests()
        self._marks = [_line(self._block_marks()), _line(self._step_marks())]

    def height(self) -> int:
        """Height in pixels of all parts together."""
        legend = sum(18 * len(lines) for lines in self._marks)
        names = 22 if self._names else 0
        strip = 18 + 16 + _BUDGET + _CACHED + _POOL + _WAITING + 20 if self._steps else 0
        return 62 + strip + 22 + self._map.height(_INSIDE, _MAP_MOST) + 28 + names + legend + 10

    def draw(self, canvas: Canvas) -> None:
        y = self._draw_head(canvas)
        if self._steps:
            y = self._draw_steps(canvas, y)
        y = self._draw_map(canvas, y)
        if self._names:
            y = self._draw_names(canvas, y)
        for lines in self._marks:
            y = self._draw_legend(canvas, y, lines)

    # -- the head ------------------------------------------------------------------

    def _draw_head(self, canvas: Canvas) -> int:
        palette = self._palette
        end = canvas.text(_MARGIN, 20, "lmscope", 13, palette.ink, 1.6)
        words = "".join(c if knows(c) else "?" for c in _short(title(self._frame), 300))
        canvas.text(end + 10, 20, _fit(words, WIDTH - end - 22, 11), 11, palette.ink_soft)
        x: float = _MARGIN
        for number, word in counts(self._frame):
            x = canvas.text(x, 43, number, 14, palette.ink, 1.6)
            x = canvas.text(x + 6, 43, word, 10.5, palette.ink_soft) + 13
        canvas.rect(_MARGIN, 53, _INSIDE, 1, palette.line)
        return 62

    # -- the strip of steps ----------------------------------------------------------

    def _draw_steps(self, canvas: Canvas, y: int) -> int:
        palette = self._palette
        bars = _join(self._steps, (_INSIDE - _LABELS) // 2)
        left, plot = _MARGIN + _LABELS, _INSIDE - _LABELS
        step = min(46.0, plot / max(16, len(bars)))
        stat = self._frame["stat"]
        canvas.text(_MARGIN, y + 10, "Steps", 11.5, palette.ink, 1.6)
        canvas.text(_MARGIN + 42, y + 10, self._step_words(stat, bars), 10.5, palette.ink_soft)
        top = y + 34
        scale_top = self._budget_scale(bars)
        zero = top + _BUDGET
        end = left + step * len(bars)
        self._label(canvas, top + 6, f"tokens {scale_top:,}")
        self._label(canvas, zero + 12, "from cache")
        self._label(canvas, zero + _CACHED + 15, f"blocks {self._map.num_blocks - 1:,}")
        most = max(bar.waiting for bar in bars)
        self._label(canvas, zero + _CACHED + _POOL + 15, f"waiting {most:,}" if most else "waiting")
        canvas.rect(end - step, top - 3, step, _BUDGET + _CACHED + _POOL + _WAITING, palette.raised)
        canvas.dashed_row(left, top, plot, palette.line, 1, 3)
        canvas.rect(left, zero, plot, 1, palette.line)
        pool = zero + _CACHED
        canvas.rect(left, pool, plot, _POOL, palette.raised)
        self._draw_axis(canvas, bars, left, step, top - 7)
        for i, bar in enumerate(bars):
            # Both edges are snapped to whole pixels, so bars touch and never overlap.
            x = round(left + i * step)
            whole = max(1, round(left + (i + 1) * step) - x)
            width = whole - (1 if step >= 5 else 0)
            self._draw_bar(canvas, bar, x, width, zero, scale_top)
            self._draw_pool(canvas, bar, x, whole, pool)
            base = pool + _POOL + _WAITING - 2
            if bar.waiting:
                tall = max(1.5, 8 * bar.waiting / most)
                canvas.rect(x, base - tall, whole, tall, palette.prefill)
            if bar.preempted:
                canvas.marker(x + width / 2, pool + _POOL + 1, 7, palette.trouble)
        canvas.rect(end - step, top - 3, 1, _BUDGET + _CACHED + _POOL + _WAITING, palette.ink)
        canvas.rect(end, top - 3, 1, _BUDGET + _CACHED + _POOL + _WAITING, palette.ink)
        return y + 18 + 16 + _BUDGET + _CACHED + _POOL + _WAITING + 20

    def _step_words(self, stat: Mapping[str, Any], bars: Sequence[StepBar]) -> str:
        info = self._frame["info"]
        parts = [
            f"{stat[name]:,} {word}"
            for name, word in (
                ("decode", "decode"),
                ("prefill", "prefill"),
                ("recompute", "computed again"),
            )
            if stat[name]
        ]
        words = (
            f"step {self._frame['step']:,}: {stat['scheduled']:,} of "
            f"{info['max_num_batched_tokens']:,} tokens"
        )
        if parts:
            words += " · " + ", ".join(parts)
        if bars and bars[0].count > 1:
            words += f" · each bar is the mean of {bars[0].count:,} steps"
        return words

    def _budget_scale(self, bars: Sequence[StepBar]) -> int:
        """Tokens at the top of the strip: the budget, or less where nearly all of it is free."""
        budget = int(self._frame["info"]["max_num_batched_tokens"])
        most = max(-(-(b.decode + b.prefill + b.recompute) // b.count) for b in bars)
        if most * 4 >= budget:
            return max(1, budget)
        top = 4
        while top < most * 1.15:
            top *= 2
        return min(top, budget)

    def _draw_bar(
        self, canvas: Canvas, bar: StepBar, x: int, width: int, zero: int, scale_top: int
    ) -> None:
        palette = self._palette
        y = float(zero)
        for tokens, colour in (
            (bar.decode, palette.decode),
            (bar.prefill, palette.prefill),
            (bar.recompute, palette.recompute),
        ):
            if not tokens:
                continue
            tall = max(1.0, round(_BUDGET * min(1.0, tokens / bar.count / scale_top) * 2) / 2)
            y -= tall
            canvas.rect(x, y, width, tall, colour)
            if colour is palette.recompute and tall >= 3:
                canvas.rect(x, y, width, tall, palette.trouble_tint)
                canvas.hatch(x, y, width, tall, colour)
        if bar.cached:
            tall = max(2.5, min(_CACHED - 2.0, _BUDGET * bar.cached / bar.count / scale_top))
            canvas.rect(x, zero + 1, width, tall, palette.background)
            canvas.frame(x, zero + 1, width, tall, palette.cached)

    def _draw_pool(self, canvas: Canvas, bar: StepBar, x: int, width: int, pool: int) -> None:
        palette = self._palette
        usable = max(1, self._map.num_blocks - 1)
        used = _POOL * bar.used / usable
        kept = min(_POOL - used, _POOL * bar.kept / usable)
        bottom = pool + _POOL
        if bar.kept:
            canvas.rect(x, bottom - used - kept, width, kept, palette.line)
        if bar.used:
            canvas.rect(x, bottom - used, width, max(used, 0.5), palette.prefill)
        if bar.evicted:
            canvas.rect(x + width / 2 - 0.5, pool, 1, 4, palette.trouble)

    def _draw_axis(
        self, canvas: Canvas, bars: Sequence[StepBar], left: int, step: float, y: int
    ) -> None:
        palette = self._palette
        every = 1
        for every in (1, 2, 5, 10, 20, 50, 100, 200, 500):
            if every * step >= 34:
                break
        last = len(bars) - 1
        for i, bar in enumerate(bars):
            if i == last:
                label, colour, weight = f"{self._frame['step']:,}", palette.ink, 1.6
            elif bar.step % every == 0 or (bar.count > 1 and i % every == 0):
                label, colour, weight = f"{bar.step:,}", palette.ink_soft, 1.0
                if (last - i) * step < 30:
                    continue
            else:
                continue
            width = text_width(label, 9.5, weight)
            x = min(left + (i + 0.5) * step - width / 2, WIDTH - _MARGIN - width)
            canvas.text(x, y, label, 9.5, colour, weight)

    def _label(self, canvas: Canvas, y: float, words: str) -> None:
        x = _MARGIN + _LABELS - 8 - text_width(words, 10)
        canvas.text(x, y, words, 10, self._palette.ink_soft)

    # -- the map -----------------------------------------------------------------------

    def _draw_map(self, canvas: Canvas, y: int) -> int:
        palette, stat = self._palette, self._frame["stat"]
        canvas.text(_MARGIN, y + 10, "Blocks", 11.5, palette.ink, 1.6)
        words = (
            f"{stat['used']:,} in use, {stat['shared']:,} shared · {stat['kept']:,} kept · "
            f"{stat['empty']:,} empty"
        )
        now = [f"{stat[key]:,} {key}" for key in ("hits", "evicted") if stat[key]]
        if now:
            words += " · now " + ", ".join(now).replace("hits", "hit")
        canvas.text(_MARGIN + 48, y + 10, words, 10.5, palette.ink_soft)
        y += 20
        self._map.draw(canvas, _MARGIN, y, _INSIDE, _MAP_MOST)
        y += self._map.height(_INSIDE, _MAP_MOST)
        self._draw_next(canvas, y + 6)
        return y + 30

    def _draw_next(self, canvas: Canvas, y: int) -> None:
        palette = self._palette
        if not self._next:
            words = "none free: the next block needed costs a preemption"
            canvas.text(_MARGIN, y + 11, words, 10.5, palette.ink_soft)
            return
        x = canvas.text(_MARGIN, y + 11, "next out", 10.5, palette.ink_soft) + 8
        state = self._columns["state"]
        for place, block_id in enumerate(self._next):
            label = f"{block_id}"
            width = text_width(label, 9.5, 1.5 if place == 0 else 1.0) + 10
            is_kept = block_id < len(state) and int(state[block_id]) & 0x0F == KEPT
            owner = palette.owner(int(self._columns["slot"][block_id])) if is_kept else None
            if owner:
                canvas.dashes(x, y, width, 16, owner.edge, 1.0, 2.0)
            else:
                canvas.frame(x, y, width, 16, palette.line)
            colour = palette.trouble_text if is_kept and place == 0 else palette.ink_soft
            canvas.text(x + 5, y + 11.5, label, 9.5, colour, 1.5 if place == 0 else 1.0)
            x += width + 3

    def _named_requests(self) -> list[tuple[str, int]]:
        """Requests to name under the map: those whose hue is on it, as many as fit."""
        if not self._frame["rows"]:
            return []
        on_map = set(self._columns["slot"].tolist())
        names: list[tuple[str, int]] = []
        taken: set[int] = set()
        x: float = _MARGIN + 60
        # The newest holder of a slot is the one whose hue is shown.
        for row in reversed(list(self._frame["rows"])):
            slot = int(row["slot"])
            name = "".join(c if knows(c) else "?" for c in _short(str(row["id"])))
            width = text_width(name, 10, 1.5) + 16
            if slot not in on_map or slot in taken or slot >= 24 or x + width > WIDTH - _MARGIN:
                continue
            taken.add(slot)
            names.append((name, slot))
            x += width + 5
        return names[::-1]

    def _draw_names(self, canvas: Canvas, y: int) -> int:
        palette = self._palette
        x = canvas.text(_MARGIN, y + 11, "requests", 10.5, palette.ink_soft) + 8
        for name, slot in self._names:
            owner = palette.owner(slot)
            width = text_width(name, 10, 1.5) + 14
            canvas.rect(x, y, width, 16, owner.tint)
            canvas.rect(x, y, 4, 16, owner.edge)
            if owner.ring == 1:
                canvas.hatch(x, y, 4, 16, palette.background)
            elif owner.ring == 2:
                canvas.dots(x, y, 4, 16, palette.background)
            canvas.text(x + 8, y + 11.5, name, 10, palette.ink, 1.5)
            x += width + 5
        return y + 22

    # -- the legend: only of marks that are drawn -----------------------------------------

    def _block_marks(self) -> list[_Mark]:
        state = self._columns["state"]
        kinds = set((state & 0x0F).tolist())
        used = self._columns["slot"][(state & 0x0F) == IN_USE]
        kept = self._columns["slot"][(state & 0x0F) == KEPT]
        slot = int(used[0]) if len(used) else 0
        has_cells = self._map.height(_INSIDE, _MAP_MOST) > 0 and self._map.num_blocks <= 10_000

        def cell(**look: Any) -> Callable[[Canvas, float, float], None]:
            return lambda canvas, x, y: _swatch(canvas, x, y, **look)

        marks = []
        if IN_USE in kinds:
            marks.append(_Mark("in use", cell(slot=slot, state=IN_USE), 22))
        if has_cells and bool((self._columns["ref"] > 1).any()):
            marks.append(_Mark("shared", cell(slot=slot, state=IN_USE, is_shared=True), 22))
        if KEPT in kinds:
            marks.append(_Mark("kept for reuse", cell(slot=int(kept[0]), state=KEPT), 22))
        if EMPTY in kinds:
            marks.append(_Mark("empty", cell(slot=0xFF, state=EMPTY), 22))
        if NULL in kinds and has_cells:
            marks.append(_Mark("null", cell(slot=0xFF, state=NULL), 22))
        for flag, words in ((HIT, "just hit"), (EVICTED, "just evicted"), (WRITTEN, "written now")):
            if has_cells and bool((state & flag).any()):
                marks.append(_Mark(words, cell(slot=slot, state=IN_USE | flag, filled=0.6), 22))
        return marks

    def _step_marks(self) -> list[_Mark]:
        palette, bars = self._palette, self._steps

        def box(colour: RGB) -> Callable[[Canvas, float, float], None]:
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

        drawn = [
            (any(bar.decode for bar in bars), "decode", box(palette.decode)),
            (any(bar.prefill for bar in bars), "prefill", box(palette.prefill)),
            (any(bar.recompute for bar in bars), "computed again", hatched),
            (any(bar.cached for bar in bars), "from cache, free", hollow),
            (any(bar.used or bar.kept for bar in bars), "pool: used, kept", pool),
            (any(bar.evicted for bar in bars), "eviction", tick),
            (any(bar.preempted for bar in bars), "preempted", triangle),
        ]
        return [_Mark(words, draw, 12) for is_drawn, words, draw in drawn if is_drawn]

    def _draw_legend(self, canvas: Canvas, y: int, lines: list[list[_Mark]]) -> int:
        for line in lines:
            x: float = _MARGIN
            for mark in line:
                mark.draw(canvas, x, y)
                left = x + mark.width + 6
                x = canvas.text(left, y + 9.5, mark.words, 10, self._palette.ink_soft) + 16
            y += 18
        return y


def _swatch(canvas: Canvas, x: float, y: float, **look: Any) -> None:
    cell = Canvas(24, 14, light().background, canvas.scale)
    draw_cell(cell, **look)
    top, left = round(y * canvas.scale), round(x * canvas.scale)
    height, width, _ = cell.pixels.shape
    canvas.pixels[top : top + height, left : left + width] = cell.pixels


def _line(marks: Sequence[_Mark]) -> list[list[_Mark]]:
    """Legend entries in lines that fit the width."""
    lines: list[list[_Mark]] = []
    room = 0.0
    for mark in marks:
        width = mark.width + 6 + text_width(mark.words, 10) + 16
        if not lines or width > room:
            lines.append([])
            room = _INSIDE
        lines[-1].append(mark)
        room -= width
    return lines


def _join(steps: Sequence[StepBar], most: int) -> list[StepBar]:
    """The same steps in at most `most` bars."""
    share = -(-len(steps) // most)
    if share <= 1:
        return list(steps)
    bars: list[StepBar] = []
    for i, bar in enumerate(steps):
        if i % share:
            bars[-1].add(bar)
        else:
            bars.append(StepBar(**vars(bar)))
    return bars


def _fit(text: str, width: float, size: float) -> str:
    """As much of a line as fits, with an ellipsis where it was cut."""
    text = _short(text, 300)
    while len(text) > 1 and text_width(text, size) > width:
        text = text[:-2] + "…"
    return text


def _short(name: str, most: int = 14) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _plural(number: int, word: str) -> str:
    return word if number == 1 else word + "s"
