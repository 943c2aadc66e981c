"""Make the README's pictures from a real run: `make images`.

Runs the demo, opens its page in Chromium at the step of the first preemption, and takes
pictures of it in the light and in the dark theme; then of views alone, as a notebook shows
them, and of a replay. Last, a run in which attention is measured.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import open_chromium
from gallery import Shot, first_preemption, show_widget
from playwright.sync_api import Browser

from lmscope import LLM, SamplingParams, open_recording, record
from lmscope.scope.recording import Recording

HERE = Path(__file__).parent

_SYSTEM = "You are a patient tutor. Answer in one short sentence. "
_QUESTIONS = (
    "What is glass made of?",
    "Why is the sky blue?",
    "Who wrote Faust?",
    "What is a prime number?",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_chromium() as chromium:
        subprocess.run([sys.executable, "-m", "lmscope.cli", "demo", "--out", folder], check=True)
        recording = open_recording(Path(folder) / "lmscope-demo.lmscope")
        _picture_page(chromium, Path(folder) / "lmscope-demo.html", recording)
        _picture_views(chromium, recording)
        _picture_attention(chromium)


def _picture_page(chromium: Browser, file: Path, recording: Recording) -> None:
    step = first_preemption(recording)
    for theme, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
        tab = chromium.new_page(viewport={"width": 1600, "height": 1100})
        tab.goto(f"{file.as_uri()}#step={step}&theme={theme}")
        tab.wait_for_selector("canvas.lms-map")
        tab.wait_for_function("() => window.__lmscope_page")
        tab.wait_for_timeout(500)
        tab.screenshot(path=HERE / name, full_page=True)
        tab.close()


def _picture_views(chromium: Browser, recording: Recording) -> None:
    step = first_preemption(recording)
    stops = (("preemption", 1, True),)
    shots = {
        "block-map": Shot(recording, step=step, views=("blocks",)),
        "prefix-tree": Shot(recording, step=step, views=("tree",)),
        "token-stream": Shot(recording, step=step, views=("tokens",)),
        "debugger-strip": Shot(
            recording, step=step, parts=1, phase="paused", views=("debugger",), breaks=stops
        ),
        "replay": Shot(
            recording, step=step, phase="paused", views=("timeline", "requests"), is_replay=True
        ),
    }
    for name, shot in shots.items():
        _picture_widget(chromium, name, shot)


def _picture_attention(chromium: Browser) -> None:
    """The map in the middle of a run, with the line about its first block."""
    prompts = [_SYSTEM + question for question in _QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = LLM("demo", block_size=8, num_kv_blocks=40)
    with llm, record(llm, attention=True) as recording:
        llm.generate(prompts, params, use_tqdm=False)
    shot = Shot(recording, step=30, views=("blocks",), colour="attention")
    _picture_widget(chromium, "attention", shot, points_at=(0.15, 0.1))


def _picture_widget(
    chromium: Browser, name: str, shot: Shot, points_at: tuple[float, float] | None = None
) -> None:
    """Write one file; `points_at` is where on the map the pointer stands, as parts of it."""
    tab = chromium.new_page(viewport={"width": 1000, "height": 300}, device_scale_factor=1.5)
    show_widget(tab, shot, "light")
    if points_at is not None:
        box = tab.locator("canvas.lms-map").bounding_box()
        assert box is not None, "there is a map to point at"
        left, top = points_at
        tab.mouse.move(box["x"] + left * box["width"], box["y"] + top * box["height"])
        tab.wait_for_timeout(200)
    tab.locator("#view").screenshot(path=HERE / f"{name}.png")
    tab.close()


if __name__ == "__main__":
    main()
