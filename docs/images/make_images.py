"""Make the README's pictures from a real run: `make images`.

Runs the demo, opens its page in Chromium at the step of the first preemption, and takes
pictures of it in the light and in the dark theme.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from lmscope import SchedulerOutput, open_recording

HERE = Path(__file__).parent


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium found; install it from the system's packages")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "lmscope.cli", "demo", "--out", folder], check=True)
        recording = open_recording(Path(folder) / "lmscope-demo.lmscope")
        step = next(
            (
                b.step
                for b in recording.boundaries
                if isinstance(b, SchedulerOutput) and b.preempted_req_ids
            ),
            recording.steps[-1],
        )
        page = (Path(folder) / "lmscope-demo.html").as_uri()
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=browser, args=["--no-sandbox", "--disable-gpu"]
            )
            for theme, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
                tab = chromium.new_page(viewport={"width": 1600, "height": 1100})
                tab.goto(f"{page}#step={step}&theme={theme}")
                tab.wait_for_selector("canvas.lms-map")
                tab.wait_for_function("() => window.__lmscope_page")
                tab.wait_for_timeout(500)
                tab.screenshot(path=HERE / name, full_page=True)
                tab.close()
            chromium.close()


if __name__ == "__main__":
    main()
