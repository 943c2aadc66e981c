"""Chromium for the scripts that take pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

__all__ = ["open_chromium"]


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """The system's Chromium without a window; SystemExit says what to install."""
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        raise SystemExit("no Chromium found; install it from the system's packages")
    with sync_playwright() as playwright:
        # Root may not use the sandbox; a machine without a screen has no GPU to draw with.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()
