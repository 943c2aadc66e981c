"""Pictures of every view in every state, for looking at: `make gallery FOLDER=somewhere`.

The widget's own bundle draws frames of a real recording in Chromium, without a kernel: light
and dark, 800 and 1,600 pixels wide, empty, running, paused, finished, alone and together, and
the page of the recording.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from browser import open_chromium
from lmscope_widgets import dashboard
from lmscope_widgets.dashboard import VIEWS
from playwright.sync_api import Browser, Page

from lmscope import SchedulerOutput, open_recording
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.recording import Recording
from lmscope.scope.view import EngineView

__all__ = ["Shot", "first_preemption", "show_widget"]

_STATIC = Path(dashboard.__file__).with_name("static")
_THEMES = ("light", "dark")
_WIDTHS = (800, 1600)
_LIVE = ["pause", "resume", "step", "break", "unbreak"]
_REPLAY = [*_LIVE, "seek", "back", "speed"]

# The part of anywidget that a widget sees: traits, messages in, messages out.
_HOST = """
async ({script, style, traits, frames}) => {
  document.head.appendChild(document.createElement("style")).textContent = style;
  const address = URL.createObjectURL(new Blob([script], {type: "text/javascript"}));
  const widget = (await import(address)).default();
  const listeners = {};
  const model = {
    get: (name) => traits[name],
    on: (name, listener) => { listeners[name] = listener; },
    off: () => {},
    send: () => {},
  };
  await widget.initialize({model});
  const bytes = (text) => new DataView(
    Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  await widget.render({model, el: document.getElementById("view")});
  for (const [message, buffers] of frames)
    listeners["msg:custom"](message, buffers.map(bytes));
}
"""


class Shot:
    """What a widget is to show: a recording up to a step, a phase, some views.

    steps    up to and including this one, none: nothing has run
    parts    of its last step: how many structs, None: all of them
    colour   of blocks: "owner" or "attention"
    """

    def __init__(
        self,
        recording: Recording,
        *,
        step: int | None = None,
        parts: int | None = None,
        phase: str = "live",
        views: tuple[str, ...] = (),
        is_replay: bool = False,
        breaks: tuple[tuple[str, int, bool], ...] = (),
        colour: str = "owner",
    ) -> None:
        self.recording = recording
        self.step = step
        self.parts = parts
        self.phase = phase
        self.views = views
        self.is_replay = is_replay
        self.breaks = breaks
        self.colour = colour

    def traits(self) -> dict[str, Any]:
        steps = self.recording.steps
        return {
            "views": list(self.views),
            "colour": self.colour,
            "commands": _REPLAY if self.is_replay else _LIVE,
            "steps": [steps[0], steps[-1]] if self.is_replay else [],
        }

    def messages(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """The frames of a page that has watched from the beginning, one per step."""
        if self.is_replay:
            message, buffers = _coded(PictureEncoder(self.recording.at(), in_bins=True), "paused")
            yield {**message, "seq": -1}, buffers
        view = EngineView(self.recording.snapshot)
        encoder = PictureEncoder(view, in_bins=True)
        number = 0
        for boundary in self.recording.boundaries:
            if self.step is None or boundary.step > self.step:
                break
            if boundary.step > view.step:
                yield _coded(encoder, "live")
                number = 0
            if boundary.step == self.step and self.parts is not None and number == self.parts:
                break
            view.apply(boundary)
            number += boundary.step == self.step
        message, buffers = _coded(encoder, self.phase)
        yield {**message, "breaks": [list(b) for b in self.breaks], "speed": 1}, buffers


def show_widget(page: Page, shot: Shot, theme: str) -> None:
    """Make the page show the widget as it is in a notebook."""
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.set_content(
        "<!doctype html><html><body style='margin:8px'><div id='view'></div></body></html>"
    )
    page.evaluate(
        _HOST,
        {
            "script": (_STATIC / "dashboard_widget.js").read_text(encoding="utf-8"),
            "style": (_STATIC / "dashboard.css").read_text(encoding="utf-8"),
            "traits": {**shot.traits(), "theme": theme},
            "frames": json.loads(json.dumps(list(shot.messages()))),
        },
    )
    ground = "#111418" if theme == "dark" else "#ffffff"
    page.evaluate(f"document.body.style.background = '{ground}'")
    page.wait_for_timeout(400)


def first_preemption(recording: Recording) -> int:
    """The step with the first preemption, the last step where there is none."""
    for boundary in recording.boundaries:
        if isinstance(boundary, SchedulerOutput) and boundary.preempted_req_ids:
            return boundary.step
    return recording.steps[-1]


def _coded(encoder: PictureEncoder, phase: str) -> tuple[dict[str, Any], list[str]]:
    message, buffers = encoder.delta(phase).to_message()
    return message, [base64.b64encode(buffer).decode("ascii") for buffer in buffers]


def _shots(recording: Recording) -> Iterator[tuple[str, Shot]]:
    step = first_preemption(recording)
    last = recording.steps[-1]
    stops = (("EngineCoreRequest", 0, True), ("preemption", 2, True))
    yield "empty", Shot(recording, phase="ready")
    yield "loading", Shot(recording, phase="loading")
    yield "running", Shot(recording, step=step)
    yield "paused", Shot(recording, step=step, parts=1, phase="paused", breaks=stops)
    yield "finished", Shot(recording, step=last, phase="finished")
    yield "dead", Shot(recording, step=step, phase="dead")
    yield "replay", Shot(recording, step=step, phase="paused", is_replay=True)
    if recording.at().attention:
        yield "attention", Shot(recording, step=step, colour="attention")
        yield (
            "only-blocks-attention",
            Shot(recording, step=step, views=("blocks",), colour="attention"),
        )
    for view in VIEWS:
        yield f"only-{view}-running", Shot(recording, step=step, views=(view,))
        yield f"only-{view}-empty", Shot(recording, phase="ready", views=(view,))


def main(arguments: list[str]) -> None:
    file, folder = Path(arguments[0]), Path(arguments[1])
    wanted = arguments[2:]
    folder.mkdir(parents=True, exist_ok=True)
    recording = open_recording(file)
    with open_chromium() as chromium:
        _picture_widget(chromium, recording, folder, wanted)
        if not wanted or "page" in wanted:
            _picture_page(chromium, recording, folder)


def _picture_widget(
    chromium: Browser, recording: Recording, folder: Path, wanted: list[str]
) -> None:
    for name, shot in _shots(recording):
        if wanted and name not in wanted:
            continue
        for theme in _THEMES:
            for width in _WIDTHS:
                page = chromium.new_page(viewport={"width": width, "height": 700})
                show_widget(page, shot, theme)
                page.screenshot(path=folder / f"{name}-{theme}-{width}.png", full_page=True)
                page.close()


def _picture_page(chromium: Browser, recording: Recording, folder: Path) -> None:
    file = folder / "page.html"
    recording.to_html(file)
    for theme in _THEMES:
        for width in _WIDTHS:
            page = chromium.new_page(viewport={"width": width, "height": 700})
            page.goto(f"{file.resolve().as_uri()}#step={first_preemption(recording)}&theme={theme}")
            page.wait_for_function("() => window.__lmscope_page")
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"page-{theme}-{width}.png", full_page=True)
            page.close()


if __name__ == "__main__":
    main(sys.argv[1:])
