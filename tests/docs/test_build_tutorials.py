"""The tutorials as HTML: outputs in them, nothing to fetch, no widget state."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"

SOURCES = (
    "print('six times seven is', 6 * 7)",
    "import plotly.graph_objects as go\ngo.Figure(go.Bar(x=[1, 2], y=[3, 4]))",
    "go.Figure(go.Bar(x=[1, 2], y=[5, 6]))",
    "from IPython.display import display\n"
    f"display({{'{WIDGET}': {{'model_id': '0'}}, 'text/html': '<b>still picture</b>',"
    " 'text/plain': 'still'}, raw=True)",
)


@pytest.fixture(scope="module")
def build_tutorials() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "build_tutorials", ROOT / "docs" / "build_tutorials.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(build_tutorials: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# A lesson"), *map(_code_cell, SOURCES)]
    )
    nbformat.write(notebook, folder / "lesson.ipynb")
    build_tutorials.main([str(folder / "lesson.ipynb"), "--out", str(folder / "_build")])
    return folder / "_build" / "lesson.html"


def _code_cell(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source)


@pytest.mark.slow
def test_a_page_holds_what_the_cells_said_and_no_widget(made: Path) -> None:
    page = made.read_text(encoding="utf-8")

    assert "six times seven is 42" in page
    assert "<b>still picture</b>" in page
    assert f'type="{WIDGET}"' not in page
    assert 'type="application/vnd.jupyter.widget-state+json"' not in page
    assert '<script src="">' not in page


@pytest.mark.slow
def test_plotly_comes_once_however_many_figures_there_are(made: Path) -> None:
    page = made.read_text(encoding="utf-8")

    assert page.count("Plotly.newPlot(") == 2
    assert 4_000_000 < len(page) < 6_500_000


@pytest.mark.slow
@pytest.mark.browser
def test_the_figures_are_drawn_without_a_network(made: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: _note(asked, request))
        page.goto(made.as_uri())
        page.wait_for_function("document.querySelectorAll('.main-svg .bars path').length >= 4")
        browser.close()

    assert asked == []


def _note(asked: list[str], request: Any) -> None:
    if not request.url.startswith(("file:", "data:", "blob:")):
        asked.append(request.url)


def test_the_pages_are_no_part_of_the_repository() -> None:
    assert "/docs/_build/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
