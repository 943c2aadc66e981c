"""The strip of steps in a still picture: tokens, what the cache saved, the pool, who waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmscope_widgets.lettering import text_width
from lmscope_widgets.palette import light
from lmscope_widgets.raster import Canvas
from lmscope_widgets.step_log import StepBar

__all__ = ["StepStrip"]

_LABELS = 78
_HEAD, _AXIS, _BUDGET, _CACHED, _POOL, _WAITING, _GAP = 18, 16, 56, 20, 22, 16, 20
_BODY = _BUDGET + _CACHED + _POOL + _WAITING


class StepStrip:
    """All steps since the start, the cursor at the last one.

    frame   the header of a full frame
    steps   bars of the steps, at least one
    width   pixels
    """

    height = _HEAD + _AXIS + _BODY + _GAP

    def __init__(self, frame: Mapping[str, Any], steps: Sequence[StepBar], width: int) -> None:
        self._frame = frame
        self._bars = _join(steps, (width - _LABELS) // 2)
        self._width = width
        self._plot = width - _LABELS
        # pixels of one bar
        self._step = min(46.0, self._plot / max(16, len(self._bars)))
        self._scale = self._token_scale()
        self._palette = light()

    def draw(self, canvas: Canvas, x: int, y: int) -> None:
        """Draw it with the top left corner at (x, y)."""
        palette = self._palette
        canvas.text(x, y + 10, "Steps", 11.5, palette.ink, 1.6)
        canvas.text(x + 42, y + 10, self._words(), 10.5, palette.ink_soft)
        top = y + _HEAD + _AXIS
        zero, pool = top + _BUDGET, top + _BUDGET + _CACHED
        left = x + _LABELS
        end = left + self._step * len(self._bars)
        most = max(bar.waiting for bar in self._bars)
        self._draw_labels(canvas, x, top, most)
        canvas.rect(end - self._step, top - 3, self._step, _BODY, palette.raised)
        canvas.dashed_row(left, top, self._plot, palette.line, 1, 3)
        canvas.rect(left, zero, self._plot, 1, palette.line)
        canvas.rect(left, pool, self._plot, _POOL, palette.raised)
        self._draw_axis(canvas, x, top - 7)
        for i, bar in enumerate(self._bars):
            # Both edges are snapped to whole pixels, so bars touch and never overlap.
            at = round(left + i * self._step)
            whole = max(1, round(left + (i + 1) * self._step) - at)
            width = whole - (1 if self._step >= 5 else 0)
            self._draw_tokens(canvas, bar, at, width, zero)
            self._draw_pool(canvas, bar, at, whole, pool)
            base = pool + _POOL + _WAITING - 2
            if bar.waiting:
                tall = max(1.5, 8 * bar.waiting / most)
                canvas.rect(at, base - tall, whole, tall, palette.prefill)
            if bar.preempted:
                canvas.marker(at + width / 2, pool + _POOL + 1, 7, palette.trouble)
        canvas.rect(end - self._step, top - 3, 1, _BODY, palette.ink)
        canvas.rect(end - 1, top - 3, 1, _BODY, palette.ink)

    def _words(self) -> str:
        stat, info = self._frame["stat"], self._frame["info"]
        words = (
            f"step {self._frame['step']:,}: {stat['scheduled']:,} of "
            f"{info['max_num_batched_tokens']:,} tokens"
        )
        kinds = (("decode", "decode"), ("prefill", "prefill"), ("recompute", "computed again"))
        parts = [f"{stat[name]:,} {word}" for name, word in kinds if stat[name]]
        if parts:
            words += " · " + ", ".join(parts)
        if self._bars[0].count > 1:
            words += f" · each bar is the mean of {self._bars[0].count:,} steps"
        return words

    def _token_scale(self) -> int:
        """Tokens at the top of the strip: the budget, or less where nearly all of it is free."""
        budget = int(self._frame["info"]["max_num_batched_tokens"])
        most = max(-(-(b.decode + b.prefill + b.recompute) // b.count) for b in self._bars)
        if most * 4 >= budget:
            return max(1, budget)
        top = 4
        while top < most * 1.15:
            top *= 2
        return min(top, budget)

    def _draw_labels(self, canvas: Canvas, x: int, top: int, most_waiting: int) -> None:
        num_blocks = int(self._frame["info"]["num_blocks"]) - 1
        waiting = f"waiting {most_waiting:,}" if most_waiting else "waiting"
        for y, words in (
            (top + 6, f"tokens {self._scale:,}"),
            (top + _BUDGET + 12, "from cache"),
            (top + _BUDGET + _CACHED + 15, f"blocks {num_blocks:,}"),
            (top + _BUDGET + _CACHED + _POOL + 15, waiting),
        ):
            at = x + _LABELS - 8 - text_width(words, 10)
            canvas.text(at, y, words, 10, self._palette.ink_soft)

    def _draw_axis(self, canvas: Canvas, x: int, y: int) -> None:
        palette = self._palette
        every = 1
        for every in (1, 2, 5, 10, 20, 50, 100, 200, 500):
            if every * self._step >= 34:
                break
        last = len(self._bars) - 1
        for i, bar in enumerate(self._bars):
            if i == last:
                label, colour, weight = f"{self._frame['step']:,}", palette.ink, 1.6
            elif (last - i) * self._step < 30:
                continue
            elif bar.step % every == 0 or (bar.count > 1 and i % every == 0):
                label, colour, weight = f"{bar.step:,}", palette.ink_soft, 1.0
            else:
                continue
            width = text_width(label, 9.5, weight)
            middle = x + _LABELS + (i + 0.5) * self._step
            canvas.text(
                min(middle - width / 2, x + self._width - width), y, label, 9.5, colour, weight
            )

    def _draw_tokens(self, canvas: Canvas, bar: StepBar, x: int, width: int, zero: int) -> None:
        """Computed tokens upwards from the zero line, those from the cache below it."""
        palette = self._palette
        y = float(zero)
        for tokens, colour in (
            (bar.decode, palette.decode),
            (bar.prefill, palette.prefill),
            (bar.recompute, palette.recompute),
        ):
            if not tokens:
                continue
            tall = max(1.0, round(_BUDGET * min(1.0, tokens / bar.count / self._scale) * 2) / 2)
            y -= tall
            canvas.rect(x, y, width, tall, colour)
            if colour is palette.recompute and tall >= 3:
                canvas.rect(x, y, width, tall, palette.trouble_tint)
                canvas.hatch(x, y, width, tall, colour)
        if bar.cached:
            tall = max(2.5, min(_CACHED - 2.0, _BUDGET * bar.cached / bar.count / self._scale))
            canvas.rect(x, zero + 1, width, tall, palette.background)
            canvas.frame(x, zero + 1, width, tall, palette.cached)

    def _draw_pool(self, canvas: Canvas, bar: StepBar, x: int, width: int, top: int) -> None:
        palette = self._palette
        usable = max(1, int(self._frame["info"]["num_blocks"]) - 1)
        used = _POOL * bar.used / usable
        kept = min(_POOL - used, _POOL * bar.kept / usable)
        bottom = top + _POOL
        if bar.kept:
            canvas.rect(x, bottom - used - kept, width, kept, palette.line)
        if bar.used:
            canvas.rect(x, bottom - used, width, max(used, 0.5), palette.prefill)
        if bar.evicted:
            canvas.rect(x + width / 2 - 0.5, top, 1, 4, palette.trouble)


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
