"""JupyterLab on this machine's loopback and a headless browser, for tests and measurements."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

__all__ = ["Lab", "Notebook", "find_browser", "open_browser", "start_lab"]

_WAIT_MS = 120_000
_START_S = 180.0
_LOOK_MS = 100

# The page of a notebook gives its parts away because of --expose-app-in-browser.
_IS_IDLE = """() => {
  const panel = window.jupyterapp?.shell?.currentWidget;
  return panel?.sessionContext?.session?.kernel?.status === 'idle';
}"""
# A view may be drawn anew, and a cell leave the page, at any time: what is found is not kept.
_LOOK_AT = """(selector) => {
  const found = [...document.querySelectorAll(selector)].at(-1);
  found?.scrollIntoView({block: "center"});
  const box = found?.getBoundingClientRect();
  return box !== undefined && box.height > 0 && box.top < innerHeight && box.bottom > 0;
}"""
_START_CELL = """(index) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.deselectAll();
  notebook.activeCellIndex = index;
  window.finished ??= {};
  window.finished[index] = false;
  window.jupyterapp.commands.execute('notebook:run-cell').then(() => {
    window.finished[index] = true;
  });
}"""
_OUTPUTS = """(index) => {
  const panel = window.jupyterapp.shell.currentWidget;
  return panel.content.widgets[index].outputArea.model.toJSON();
}"""
_SHUT_DOWN = "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.shutdown?.()"


class Notebook:
    """A notebook that is open in the browser, with a kernel of its own.

    page     the browser's page, for anything that is not here
    errors   what went wrong in the page: exceptions that nobody caught
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        page.set_default_timeout(_WAIT_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url, wait_until="domcontentloaded")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_function(_IS_IDLE)

    def start(self, index: int) -> None:
        """Run a cell and do not wait for its end."""
        self.page.evaluate(_START_CELL, index)

    def wait(self, index: int) -> None:
        """Wait for the end of a cell that was started; RuntimeError with an error in it."""
        # Seldom enough that looking costs the page nothing.
        self.page.wait_for_function(
            "(index) => window.finished?.[index]", arg=index, polling=_LOOK_MS
        )
        for output in self.outputs(index):
            if output["output_type"] == "error":
                raise RuntimeError("\n".join(output["traceback"]))

    def run(self, index: int) -> str:
        """Run a cell to its end; returns what it printed."""
        self.start(index)
        self.wait(index)
        return self.text(index)

    def look_at(self, selector: str) -> None:
        """Scroll to the last element that a selector finds, as soon as there is one."""
        self.page.wait_for_function(_LOOK_AT, arg=selector, polling=_LOOK_MS)

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """The outputs of a cell as the notebook would be saved now."""
        outputs: list[dict[str, Any]] = self.page.evaluate(_OUTPUTS, index)
        return outputs

    def text(self, index: int) -> str:
        """What a cell wrote to stdout."""
        return "".join(
            "".join(output["text"])
            for output in self.outputs(index)
            if output["output_type"] == "stream" and output["name"] == "stdout"
        )

    def close(self) -> None:
        try:
            self.page.evaluate(_SHUT_DOWN)
        finally:
            self.page.close()


class Lab:
    """A running JupyterLab and a browser.

    init_script   JavaScript that runs first in each page, if any
    """

    init_script = ""

    def __init__(self, url: str, folder: Path, context: Any) -> None:
        self.url = url
        self.folder = folder
        self.context = context
        self._open: list[Notebook] = []

    def open(self, name: str, cells: Sequence[str], *, app: str = "doc/tree") -> Notebook:
        """Write a notebook with these code cells and open it with a kernel.

        app   "doc/tree" for JupyterLab, "notebooks" for Notebook 7
        """
        content = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(code) for code in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(content, self.folder / name)
        return self._open_file(name, app)

    def open_copy(self, path: Path) -> Notebook:
        """Open a copy of a notebook with a kernel."""
        shutil.copy(path, self.folder / path.name)
        return self._open_file(path.name)

    def open_again(self, name: str) -> Notebook:
        """Open a notebook whose tab was closed; its kernel still runs."""
        self._open = [notebook for notebook in self._open if not notebook.page.is_closed()]
        return self._open_file(name)

    def _open_file(self, name: str, app: str = "doc/tree") -> Notebook:
        page = self.context.new_page()
        if self.init_script:
            page.add_init_script(self.init_script)
        notebook = Notebook(page, f"{self.url}/{app}/{name}?reset")
        self._open.append(notebook)
        return notebook

    def close_notebooks(self) -> None:
        """Close what was opened; a kernel left running would slow what comes next."""
        while self._open:
            self._open.pop().close()


def find_browser() -> str | None:
    """The system's Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def open_browser(path: str, profile: Path) -> Iterator[Any]:
    """A headless browser with a profile of its own: Playwright's context."""
    from playwright.sync_api import sync_playwright

    options = [
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--no-sandbox")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=path,
            headless=True,
            viewport={"width": 1280, "height": 1000},
            args=options,
        )
        try:
            yield context
        finally:
            context.close()


@contextmanager
def start_lab(root: Path) -> Iterator[tuple[str, Path]]:
    """JupyterLab with settings of its own in `root`: URL and folder of its notebooks."""
    folder = root / "notebooks"
    folder.mkdir()
    settings = root / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    environment = {
        **os.environ,
        "JUPYTERLAB_SETTINGS_DIR": str(root / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(root / "config"),
        "JUPYTER_DATA_DIR": str(root / "data"),
        "JUPYTER_RUNTIME_DIR": str(root / "runtime"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "IPYTHONDIR": str(root / "ipython"),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "jupyterlab"),
        "--allow-root",
        "--no-browser",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        # Reachable from this machine only, and gone soon.
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]
    log_path = root / "log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_for(url + "/api/status", process, log_path)
        yield url, folder
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                answer.read()
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > end:
                text = log_path.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"JupyterLab did not start:\n{text}") from None
            time.sleep(0.2)
