"""Text of a model is text wherever it is shown: in the live view, in the page, in a plot."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmscope_widgets import dashboard

from lmscope import SamplingParams, record
from lmscope.llm import LLM
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.recording import Recording

HOSTILE = (
    "<script>steal()</script><img src=x onerror=steal()>&lt;b&gt;\u202egnp.exe\u2066\x1b[2J"
    '"></td><style>*{display:none}</style>'
)
MEGABYTE = 1_000_000
STATIC = Path(dashboard.__file__).with_name("static")

# A widget as a front end runs it, with the frames that Python sends.
HOST = """
async ({script, message, buffers}) => {
  const address = URL.createObjectURL(new Blob([script], {type: "text/javascript"}));
  const widget = (await import(address)).default();
  const listeners = {};
  const traits = {views: [], commands: ["pause"], steps: []};
  const model = {
    get: (name) => traits[name], on: (name, listener) => { listeners[name] = listener; },
    off: () => {}, send: () => {},
  };
  await widget.initialize({model});
  await widget.render({model, el: document.getElementById("view")});
  const bytes = (text) => new DataView(
    Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  listeners["msg:custom"](message, buffers.map(bytes));
}
"""


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Two requests whose prompts and outputs are hostile, one of them long."""
    text = HOSTILE.encode()
    with LLM(
        "scripted",
        execute="scripted",
        script=lambda request_id, position: text[position % len(text)],
        block_size=64,
        num_kv_blocks=400,
        max_num_batched_tokens=8192,
    ) as engine:
        with record(engine) as made:
            params = SamplingParams(max_tokens=len(text), ignore_eos=True)
            engine.generate([HOSTILE, HOSTILE * 20], params, use_tqdm=False)
        return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


def open_page(browser: Any) -> tuple[Any, list[str]]:
    errors: list[str] = []
    page = browser.new_page()
    page.add_init_script("window.steal = () => { window.stolen = true; }")
    page.on("pageerror", lambda error: errors.append(str(error)))
    return page, errors


def check(page: Any, errors: list[str]) -> None:
    for key in ("t", "t", "?", "?", "]", "Home", "End", "e"):
        page.keyboard.press(key)
    page.wait_for_timeout(100)
    text = page.locator(".lms").inner_text()
    assert "<script>steal()</script>" in text
    assert "<U+202E>" in text
    assert "\u202e" not in page.locator(".lms").text_content()
    assert page.locator(".lms script, .lms style, .lms img:not(.lms-entry > img)").count() == 0
    # Those of the legend are our own: drawn here, without words.
    own = page.locator(".lms .lms-entry > img").evaluate_all(
        "images => images.map((i) => [i.src.slice(0, 22), i.alt, i.getAttribute('onerror')])"
    )
    assert own
    assert all(image == ["data:image/png;base64,", "", None] for image in own)
    assert page.locator(".lms").is_visible()
    assert page.evaluate("() => window.stolen") is None
    assert errors == []


@pytest.mark.browser
def test_markup_and_reordering_characters_are_only_shown_in_the_page(
    recording: Recording, browser: Any, tmp_path: Path
) -> None:
    file = tmp_path / "run.html"
    recording.to_html(file)
    page, errors = open_page(browser)
    page.goto(file.as_uri())
    page.wait_for_function("() => window.__lmscope_page")
    check(page, errors)
    page.close()


@pytest.mark.browser
def test_markup_and_megabytes_are_only_shown_in_the_live_view(
    recording: Recording, browser: Any
) -> None:
    view = recording.at()
    message, buffers = PictureEncoder(view, in_bins=True).full("live").to_message()
    # A page bounds what it draws whatever it is sent, so here it is sent too much.
    long = {**message["rows"][0], "id": "long", "text": HOSTILE + "x" * MEGABYTE, "tokens": []}
    message = {**message, "rows": [*message["rows"], long]}
    page, errors = open_page(browser)
    page.set_content("<html><body><div id='view'></div></body></html>")
    page.evaluate(
        HOST,
        {
            "script": (STATIC / "dashboard_widget.js").read_text(encoding="utf-8"),
            "message": message,
            "buffers": [base64.b64encode(buffer).decode("ascii") for buffer in buffers],
        },
    )
    page.wait_for_function("() => document.querySelector('.lms-token, .lms-tokens')")
    check(page, errors)
    page.close()


def test_a_frame_of_a_megabyte_of_text_is_small(recording: Recording) -> None:
    view = recording.at()
    for request in view.requests.values():
        request.text += "<b>\u202e" * (MEGABYTE // 4)
    frame = PictureEncoder(view).full("live")

    assert all(len(row["text"]) <= 4_000 for row in frame.header["rows"])
