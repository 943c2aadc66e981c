"""Make the README's pictures from a real run: `make images`.

Runs the demo, opens its page in Chromium at the step of the first preemption, and takes
pictures of it in the light and in the dark theme; then of views alone, as a notebook shows
them, and of a replay.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import open_chromium
from gallery import Shot, first_preemption, show_widget
from playwright.sync_api import Browser

from lmscope import open_recording
from lmscope.scope.recording import Recording

HERE = Path(__file__).parent


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_chromium() as chromium:
        subprocess.run([sys.executable, "-m", "lmscope.cli", "demo", "--out", folder], check=True)
        recording = open_recording(Path(folder) / "lmscope-demo.lmscope")
        _picture_page(chromium, Path(folder) / "lmscope-demo.html", recording)
        _picture_views(chromium, recording)


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
        tab = chromium.new_page(viewport={"width": 1000, "height": 300}, device_scale_factor=1.5)
        show_widget(tab, shot, "light")
        tab.locator("#view").screenshot(path=HERE / f"{name}.png")
        tab.close()


if __name__ == "__main__":
    main()
