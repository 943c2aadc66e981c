"""The still picture: what a saved notebook shows where no kernel and no widget is.

An output carries it beside the live view as text/html (one image with alt text, a plain
table, the text of the requests) and as text/plain. It has to read without any style, for
GitHub takes styles and scripts away, and it stays below 50 kB whatever is in it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lmscope.scope.attention_words import percent
from lmscope.scope.visible import escape, visible
from lmscope_widgets.step_log import StepBar
from lmscope_widgets.still_map import Bytes
from lmscope_widgets.still_picture import WIDTH, counts, draw_picture, title

__all__ = ["MOST_BYTES", "alt_text", "still"]

MOST_BYTES = 48_000
"""Most bytes of text/html and text/plain together; an output has 50 kB with the rest."""

_MOST_PLAIN = 4_000
_MOST_ROWS = 24
_MOST_TEXTS = 5_000
_MOST_WHY = 160
_MOST_ID = 60
_MOST_ALT = 800
# Long lines wrap where styles are kept.
_PRE = '<pre style="white-space:pre-wrap">'

# What to give up, in this order, until the picture fits.
_QUALITIES: tuple[dict[str, Any], ...] = (
    {"scale": 2, "shades": 2, "labels": 2},
    {"scale": 2, "shades": 2, "labels": 1},
    {"scale": 2, "shades": 1, "labels": 1},
    {"scale": 2, "shades": 2, "labels": 0},
    {"scale": 1, "shades": 3, "labels": 1},
    {"scale": 1, "shades": 1, "labels": 0},
)


def still(
    frame: Mapping[str, Any],
    columns: Mapping[str, Bytes],
    steps: Sequence[StepBar],
    plain: str,
    views: Collection[str] | None = None,
    *,
    colour: str = "owner",
) -> dict[str, str]:
    """text/html and text/plain of a picture, together at most `MOST_BYTES` of UTF-8.

    frame     the header of a full frame; with `most_attended`, blocks as in
              `lmscope.scope.attention_words`, where they are coloured by attention
    columns   its columns, one entry per block
    steps     bars of the steps since the start
    plain     the picture in characters
    views     draw and write only what these views show, under the header; None: everything
    colour    of blocks: "owner", or "attention" where somebody measured it
    """
    plain = _cut_bytes(visible(plain[: _MOST_PLAIN + 1]), _MOST_PLAIN)
    words = _words(frame, views)
    if colour == "attention" and (views is None or "blocks" in views):
        words = _attention(frame) + words
    room = MOST_BYTES - len(plain.encode()) - len(words.encode())
    picture = ""
    for quality in _QUALITIES:
        data = draw_picture(frame, columns, steps, views=views, colour=colour, **quality)
        picture = _image(frame, data)
        if len(picture.encode()) <= room:
            break
    else:
        # Cannot happen with the limits above; an output without its picture still reads.
        picture = f"<p>{_cell(alt_text(frame), _MOST_ALT)}</p>"
    return {"text/html": f"<div>\n{picture}\n{words}</div>", "text/plain": plain}


def alt_text(frame: Mapping[str, Any]) -> str:
    """The header in words."""
    numbers = ", ".join(f"{number} {word}" for number, word in counts(frame))
    text = f"lmscope: {title(frame)}. {numbers}."
    more = (str(frame.get(key) or "") for key in ("in_flight", "note"))
    return " ".join((text, *filter(None, more)))


def _image(frame: Mapping[str, Any], data: bytes) -> str:
    coded = base64.b64encode(data).decode("ascii")
    return (
        f'<img alt="{_cell(alt_text(frame), _MOST_ALT)}" width="{WIDTH}" '
        f'style="max-width:100%" src="data:image/png;base64,{coded}">'
    )


def _words(frame: Mapping[str, Any], views: Collection[str] | None) -> str:
    """What stands under the image: the numbers, and what the views without a drawing show."""
    rows = frame["rows"]
    if views is None:
        return _table(rows) + _texts(rows)
    parts = [_table(rows) if "requests" in views else _numbers(frame)]
    if "tree" in views:
        parts.append(_tree(frame))
    if "tokens" in views:
        parts.append(_texts(rows))
    if "debugger" in views:
        parts.append(_struct(frame))
    return "".join(parts)


def _attention(frame: Mapping[str, Any]) -> str:
    """The most attended blocks, or that nobody measured it."""
    lines = [
        f'<tr><td align="right">{block_id}</td><td align="right">{percent(share)}</td>'
        f'<td align="left">{_cell(_some(owners), _MOST_WHY)}</td></tr>'
        for block_id, share, owners in frame.get("most_attended", ())
    ]
    if not lines:
        return "<p>Attention was not measured in this step.</p>\n"
    names = "".join(f"<th>{name}</th>" for name in ("most attended block", "share", "of"))
    return "\n".join(["<table>", f"<tr>{names}</tr>", *lines, "</table>"]) + "\n"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "–") + more


def _numbers(frame: Mapping[str, Any]) -> str:
    """The header as a table."""
    lines = [
        f'<tr><td align="left">{word}</td><td align="right">{number}</td></tr>'
        for number, word in counts(frame)
    ]
    return "\n".join(["<table>", *lines, "</table>"]) + "\n"


def _tree(frame: Mapping[str, Any]) -> str:
    """The prefix tree as a table: place in the text, readers, text."""
    size = int(frame["info"]["block_size"])
    nodes = sorted((frame.get("tree") or {}).get("nodes", ()), key=lambda node: (node[2], node[0]))
    names = ("tokens", "read by", "text")
    lines = ["<table>", "".join(("<tr>", *(f'<th align="left">{n}</th>' for n in names), "</tr>"))]
    for _, _, start, count, text, readers, *kept_by in nodes[:_MOST_ROWS]:
        reads = ", ".join(map(str, readers[:8])) or f"kept from {kept_by[0] or '–'}"
        more = f" and {len(readers) - 8} more" if len(readers) > 8 else ""
        cells = (
            f"{start * size:,} to {(start + count) * size - 1:,}",
            _cell(reads + more, _MOST_WHY),
            _cell(text, _MOST_WHY),
        )
        lines.append("<tr>" + "".join(f'<td align="left">{cell}</td>' for cell in cells) + "</tr>")
    if len(nodes) > _MOST_ROWS:
        lines.append(f'<tr><td colspan="3">{len(nodes) - _MOST_ROWS:,} more</td></tr>')
    if not nodes:
        return "<p>No prefixes yet.</p>\n"
    return "\n".join([*lines, "</table>"]) + "\n"


def _struct(frame: Mapping[str, Any]) -> str:
    """Where the engine stands, and the struct that crossed last."""
    standing = " ".join(filter(None, (str(frame.get(key) or "") for key in ("where", "in_flight"))))
    words = f"<p>{_cell(standing, _MOST_ALT)}</p>\n"
    struct = frame.get("struct")
    if not struct:
        return words
    lines = [
        f"{_cell(str(name), _MOST_ID)}  {_cell(json.dumps(value, ensure_ascii=False), _MOST_WHY)}"
        for name, value in struct["fields"]
    ]
    kind = _cell(str(struct["kind"]), _MOST_ID)
    return words + _PRE + "\n".join([kind, *lines]) + "</pre>\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per request that reads without style: state is a word, shares are numbers."""
    if not rows:
        return ""
    names = (
        "request",
        "why, or how it ended",
        "prompt",
        "output",
        "from cache",
        "blocks at most",
        "preemptions",
        "waited",
    )
    head = _line("th", names)
    lines = ["<table>", head]
    shown = list(rows)[-_MOST_ROWS:]
    if len(shown) < len(rows):
        lines.append(
            f'<tr><td>…</td><td colspan="{len(names) - 1}">'
            f"{len(rows) - len(shown):,} earlier requests</td></tr>"
        )
    for row in shown:
        waited = row.get("waited")
        cells = (
            _cell(str(row["id"]), _MOST_ID),
            _cell(str(row["why"]) or str(row["state"]), _MOST_WHY),
            f"{row['prompt']:,}",
            f"{row['output']:,}",
            f"{row['cached']:,}" if row["cached"] and row["cached"] > 0 else "–",
            f"{row.get('most_blocks') or row['blocks']:,}",
            f"{row['preemptions']:,}" if row["preemptions"] else "–",
            "–" if waited is None else _steps(waited),
        )
        lines.append(_line("td", cells))
    lines.append("</table>")
    return "\n".join(lines) + "\n"


def _line(tag: str, cells: Sequence[str]) -> str:
    """A table row: two columns of words, then numbers."""
    # An attribute for readers that drop styles, a style for those whose own would win.
    words = [f'<{tag} align="left" style="text-align:left">{cell}</{tag}>' for cell in cells[:2]]
    numbers = [f'<{tag} align="right">{cell}</{tag}>' for cell in cells[2:]]
    return f"<tr>{''.join(words)}{''.join(numbers)}</tr>"


def _texts(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of the requests, each with an equal share of the room."""
    shown = list(rows)[-_MOST_ROWS:]
    if not shown:
        return ""
    share = max(60, _MOST_TEXTS // len(shown))
    parts = []
    for row in shown:
        # Cut twice: megabytes are not escaped only to be thrown away.
        prompt = escape(str(row["prompt_text"])[-share:])
        prompt = _cut_bytes(prompt, share // 3, keep_end=True)
        output = _cut_bytes(escape(str(row["text"])[:share]), share * 2 // 3)
        name = _cell(str(row["id"]), _MOST_ID)
        # A prompt is one line; what the model wrote keeps its lines.
        parts.append(f"{name}  {' '.join(prompt.split())}\n{output}".rstrip())
    return _PRE + "\n\n".join(parts) + "</pre>\n"


def _cell(text: str, most: int) -> str:
    """Escaped text of at most `most` bytes."""
    return _cut_bytes(escape(_short(text, most)), most)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _cut_bytes(text: str, most: int, *, keep_end: bool = False) -> str:
    """At most `most` bytes of UTF-8, an ellipsis where something is missing.

    Escaped text is not cut inside an entity.
    """
    data = text.encode()
    if len(data) <= most:
        return text
    kept = data[-(most - 3) :] if keep_end else data[: most - 3]
    cut = kept.decode(errors="ignore")
    if keep_end:
        end = cut.find(";", 0, 6)
        cut = cut[end + 1 :] if end >= 0 and "&" not in cut[:end] else cut
        return "…" + cut
    start = cut.rfind("&", len(cut) - 6)
    if start >= 0 and ";" not in cut[start:]:
        cut = cut[:start]
    return cut + "…"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
