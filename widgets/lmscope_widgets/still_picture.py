"""The still picture of a run as one PNG: title, strip of steps, block map, legend.

It is drawn from a full frame (docs/picture.md) and the log of steps, on a white ground of
its own, 800 pixels wide at two device pixels each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lmscope_widgets.lettering import knows, text_width
from lmscope_widgets.palette import light
from lmscope_widgets.raster import Canvas
from lmscope_widgets.step_log import StepBar
from lmscope_widgets.still_attention import grounds, top_words
from lmscope_widgets.still_legend import Legend
from lmscope_widgets.still_map import KEPT, BlockMap, Bytes
from lmscope_widgets.still_steps import StepStrip

__all__ = ["WIDTH", "counts", "draw_picture", "title"]

WIDTH = 800
_MARGIN = 12
_INSIDE = WIDTH - 2 * _MARGIN
_MAP_MOST = 400


def draw_picture(
    frame: Mapping[str, Any],
    columns: Mapping[str, Bytes],
    steps: Sequence[StepBar],
    *,
    scale: int = 2,
    shades: int = 2,
    labels: int = 2,
    views: Collection[str] | None = None,
    colour: str = "owner",
) -> bytes:
    """The picture as a PNG file.

    frame     the header of a full frame
    columns   its columns slot, state, ref and fill, one entry per block
    steps     bars of the steps since the start
    scale     device pixels per pixel
    shades    shades at the edge of a letter
    labels    in blocks that are large enough: 2 ids, names and text, 1 ids and names, 0 none
    views     the header and what these views show; None: everything
    colour    of blocks: "owner", or "attention" where somebody measured it

    Scale, shades and labels are what to give up for a smaller file.
    """
    drawing = _Drawing(frame, columns, steps, labels, views, colour)
    canvas = Canvas(WIDTH, drawing.height(), light().background, scale, shades)
    drawing.draw(canvas)
    return canvas.png()


def title(frame: Mapping[str, Any]) -> str:
    """What is shown: model, pool, budget, step and phase."""
    info = frame["info"]
    engine = f" · {info['engine']}" if info["engine"] else ""
    return (
        f"{_short(info['model'], 120)} · {info['num_blocks']:,} blocks of "
        f"{info['block_size']} tokens · budget {info['max_num_batched_tokens']:,}{engine} · "
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


class _Drawing:
    def __init__(
        self,
        frame: Mapping[str, Any],
        columns: Mapping[str, Bytes],
        steps: Sequence[StepBar],
        labels: int,
        views: Collection[str] | None,
        colour: str,
    ) -> None:
        self._has_map = views is None or "blocks" in views
        if views is not None and "timeline" not in views:
            steps = ()
        self._frame = frame
        self._columns = columns
        self._palette = light()
        self._next = [int(block_id) for block_id in frame.get("next", ())]
        self._slots = {str(row["id"]): int(row["slot"]) for row in frame["rows"]}
        by_attention = None
        if colour == "attention":
            by_attention = grounds(frame, len(columns["state"]))
        top = None if by_attention is None else top_words(frame)
        self._map = BlockMap(
            columns,
            frame.get("cells", ()),
            int(frame["info"]["block_size"]),
            self._next,
            self._slots,
            labels,
            by_attention,
        )
        self._names = self._named_requests() if self._has_map else []
        self._strip = StepStrip(frame, steps, _INSIDE) if steps else None
        has_bands = self._map.has_bands(_INSIDE, _MAP_MOST)
        drawn = columns if self._has_map else None
        self._legend = Legend(drawn, steps, _INSIDE, has_bands, top)

    def height(self) -> int:
        """Height in pixels of all parts together."""
        strip = self._strip.height if self._strip else 0
        names = 22 if self._names else 0
        blocks = 22 + self._map.height(_INSIDE, _MAP_MOST) + 28 if self._has_map else 0
        return 62 + strip + blocks + names + self._legend.height + 10

    def draw(self, canvas: Canvas) -> None:
        y = self._draw_head(canvas)
        if self._strip is not None:
            self._strip.draw(canvas, _MARGIN, y)
            y += self._strip.height
        if self._has_map:
            y = self._draw_map(canvas, y)
        if self._names:
            y = self._draw_names(canvas, y)
        self._legend.draw(canvas, _MARGIN, y)

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
