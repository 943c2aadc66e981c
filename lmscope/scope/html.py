"""One page with a whole run: no network, no kernel, the widgets' own drawing code.

The page holds a frame per step (docs/picture.md), deflated, and a plain table for readers
without scripts. Whatever a model wrote is data in it, never markup.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lmscope.errors import LmscopeError
from lmscope.scope.attention_words import most_attended, percent
from lmscope.scope.engine_words import engine_words
from lmscope.scope.picture import VERSION, PictureEncoder
from lmscope.scope.view import EngineView
from lmscope.scope.visible import escape
from lmscope.scope.write_file import replace_file

if TYPE_CHECKING:
    from lmscope.scope.recording import Recording

__all__ = ["page_frames", "write_html"]

_MOST_DETAILED_STEPS = 400
_PHASE = "replay"
_MAX_TABLE_ROWS = 1000
_MAX_TABLE_TEXT = 1000

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="lmscope"></div>
<noscript>
{table}
</noscript>
<script type="application/octet-stream" id="lmscope-data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def write_html(recording: Recording, path: str | Path) -> None:
    """Write the page of a recording; the file appears whole or not at all.

    LmscopeError when this installation lacks the page's script or style.
    """
    script, style = _bundle("page.js"), _bundle("dashboard.css")
    data, view = _packed(recording)
    page = _PAGE.format(
        title=escape(f"lmscope: {view.info.model}, {view.totals.requests} requests"),
        # Neither may end its element early, nor begin a comment that hides the end.
        style=re.sub("</(?=style)", r"<\\/", style, flags=re.IGNORECASE),
        script=re.sub("<(?=/script|!--)", r"\\x3C", script, flags=re.IGNORECASE),
        table=_table(view),
        data=data,
    )

    def write(file: BinaryIO) -> None:
        file.write(page.encode("utf-8"))

    replace_file(path, write)


def page_frames(recording: Recording) -> Iterator[dict[str, Any]]:
    """The frames of a page: one before the first step, one after each step's last struct.

    A run of at most 400 steps has one for each kind of struct that crossed in a step.
    """
    for frame, _ in _frames(recording):
        yield frame


def _frames(recording: Recording) -> Iterator[tuple[dict[str, Any], EngineView]]:
    view = EngineView(recording.snapshot)
    # Each step has a frame of its own, so nobody needs the log.
    encoder = PictureEncoder(view, has_log=False, in_bins=True)
    is_detailed = len(recording.steps) <= _MOST_DETAILED_STEPS
    for boundary in recording.boundaries:
        is_other_kind = is_detailed and view.boundary not in ("", type(boundary).__name__)
        if boundary.step > view.step or is_other_kind:
            yield encoder.delta(_PHASE).to_page(), view
        view.apply(boundary)
    yield encoder.delta(_PHASE).to_page(), view


def _packed(recording: Recording) -> tuple[str, EngineView]:
    """All frames as one deflated base64 text, and the view at the end."""
    packer = zlib.compressobj(9)
    parts = [packer.compress(b'{"v":%d,"frames":[' % VERSION)]
    separator = b""
    for frame, view in _frames(recording):
        text = json.dumps(frame, ensure_ascii=False, separators=(",", ":"))
        parts.append(packer.compress(separator + text.encode("utf-8")))
        separator, last = b",", view
    parts += [packer.compress(b"]}"), packer.flush()]
    return base64.b64encode(b"".join(parts)).decode("ascii"), last


def _bundle(name: str) -> str:
    """A file that the widgets' front end is built into."""
    try:
        return (resources.files("lmscope_widgets") / "static" / name).read_text("utf-8")
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise LmscopeError(
            f"lmscope_widgets/static/{name} is missing; reinstall lmscope, or build it with "
            "`npm ci && npm run build` in widgets/"
        ) from error


def _table(view: EngineView) -> str:
    """The run for readers without scripts: what each request asked, got, cost and waited for."""
    names = (
        "request", "how it ended", "prompt", "output", "prompt tokens", "from cache",
        "output tokens", "blocks at most", "preemptions", "waited, s",
    )  # fmt: skip
    totals = view.totals
    engine = engine_words(view.info)
    running_on = f" ({escape(engine)})" if engine else ""
    lines = [
        f"<p>{escape(view.info.model)}{running_on}: {view.step} steps, {totals.requests} requests, "
        f"{totals.output_tokens} output tokens, {totals.hits} blocks hit, "
        f"{totals.evictions} evicted, {totals.preemptions} preemptions</p>",
        "<table>",
        "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>",
    ]
    shown = list(view.requests)[:_MAX_TABLE_ROWS]
    sentences = view.sentences(shown)
    for request_id in shown:
        request = view.requests[request_id]
        scheduled = request.first_scheduled_time
        waited = "–" if scheduled is None else f"{scheduled - request.arrival_time:.3f}"
        cells = (
            request_id,
            sentences[request_id],
            (request.prompt or "")[-_MAX_TABLE_TEXT:],
            request.text[:_MAX_TABLE_TEXT],
            request.num_prompt_tokens,
            max(0, request.num_cached_tokens),
            request.num_output_tokens,
            request.max_blocks,
            request.num_preemptions,
            waited,
        )
        lines.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    lines.append("</table>")
    if view.attention:
        most = "; ".join(
            f"block {block_id} {percent(share)} ({', '.join(owners) or 'nobody'})"
            for block_id, share, owners in most_attended(view)
        )
        lines.append(f"<p>{escape(f'most of the last attention went to {most}')}</p>")
    if len(view.requests) > len(shown):
        lines.append(f"<p>{len(view.requests) - len(shown)} more requests are not listed</p>")
    return "\n".join(lines)
