"""A JupyterLab server and a headless browser, one of each for all tests of this folder."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from widgets_lab import Lab, Notebook, find_browser, open_browser, start_lab

__all__ = ["Lab", "Notebook"]

_MOST_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is an end-to-end test that needs a browser."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("e2e")
            item.add_marker("browser")
            item.add_marker("slow")


@pytest.fixture(scope="session")
def browser_path() -> str:
    """The system's Chromium."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium on this machine")
    return path


@pytest.fixture(scope="session")
def browser_context(browser_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless browser with a profile of its own."""
    with open_browser(browser_path, tmp_path_factory.mktemp("profile")) as context:
        yield context


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """JupyterLab on this machine's loopback, with settings of its own: URL and folder."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(
            f"the tests in a browser took {_MOST_S} s; all of them together may not take longer"
        )

    # A browser that hangs must not hold up everything else.
    earlier = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_MOST_S)
    try:
        with start_lab(tmp_path_factory.mktemp("lab")) as served:
            yield served
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


@pytest.fixture
def lab(lab_server: tuple[str, Path], browser_context: Any) -> Iterator[Lab]:
    lab = Lab(*lab_server, browser_context)
    yield lab
    lab.close_notebooks()
