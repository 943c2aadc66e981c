"""Every notebook in tutorials/ runs offline, and what it leaves reads without a kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

TUTORIALS = sorted((Path(__file__).parents[2] / "tutorials").glob("*.ipynb"))
MOST_BYTES = 50_000
WIDGET = "application/vnd.jupyter.widget-view+json"

# A path that begins at the root, at somebody's home or at a drive.
MACHINE_PATH = re.compile(
    r"""["'](/|~|[A-Za-z]:[\\/])|/(home|Users|root|tmp|mnt|var|opt)/|[A-Za-z]:\\"""
)

# How a tutorial answers a prediction. The cell `predict-x` holds it, and `check-x` the answer.
ANSWER = re.compile(
    r"you: (?P<guess>.+?)    engine: (?P<engine>.+?)    (?P<mark>[✓✗])\nits reason: \w.+\n"
)

# What the engine says to each prediction; the prose around the cells is written for these.
ANSWERS = {
    "01_first_tokens": {
        "check-first-step": "19",
        "check-second-step": "1",
        "check-hit": "16",
        "check-last-token": "8",
        "check-chunks": "3",
        "check-victim": "'1'",
        "check-again": "12",
    },
    "04_preemption_and_the_scheduler": {
        "check-budget": "15",
        "check-behind": "0",
        "check-victim": "'C'",
        "check-admitted": "0",
        "check-again": "8",
        "check-what-if": "15",
    },
    "05_reading_a_recording": {
        "check-first-token": "42",
        "check-reason": "'behind'",
        "check-hits": "48",
        "check-cost": "17",
        "check-redacted": "400",
    },
    "02_paged_kv_cache": {
        "check-blocks": "4",
        "check-next-block": "5",
        "check-evicted": "4",
        "check-holders": "'in_use'",
        "check-second": "0",
        "check-bytes": "46080",
    },
    "03_prefix_caching": {
        "check-chain": "0",
        "check-twins": "16",
        "check-evicted": "8",
        "check-attempts": "6",
        "check-turns": "20",
    },
}


def code_cells(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def outputs(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    return (output for cell in code_cells(notebook) for output in cell.outputs)


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def is_bar(output: nbformat.NotebookNode) -> bool:
    """Whether an output is a progress bar of tqdm, which is a widget, too."""
    return re.match(r"[^\n]*\d+%\|", output.data.get("text/plain", "")) is not None


@pytest.fixture(scope="module", params=TUTORIALS, ids=lambda path: path.stem)
def executed(
    request: pytest.FixtureRequest,
    demo_model: Path,
    run_notebook: Callable[[nbformat.NotebookNode], nbformat.NotebookNode],
) -> tuple[str, nbformat.NotebookNode]:
    """The name of a tutorial, and its notebook after all cells have run."""
    return request.param.stem, run_notebook(nbformat.read(request.param, as_version=4))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_committed_as_source(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)

    assert not list(outputs(notebook))
    assert all(cell.execution_count is None for cell in code_cells(notebook))
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_names_no_place_of_a_machine(path: Path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert not [cell.source for cell in cells if MACHINE_PATH.search(cell.source)]


@pytest.mark.parametrize(
    "source",
    ["open('/etc/hosts')", 'Path("~/x")', r'save("C:\\run")', "%cd /home/me/x", "!ls /tmp/run"],
)
def test_places_of_a_machine_are_recognised(source: str):
    assert MACHINE_PATH.search(source)


def test_there_is_a_tutorial_for_all_answers():
    assert ANSWERS.keys() <= {path.stem for path in TUTORIALS}


@pytest.mark.slow
def test_a_tutorial_runs_without_errors_and_warnings(executed):
    _, notebook = executed

    assert all(cell.execution_count for cell in code_cells(notebook))
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


@pytest.mark.slow
def test_what_a_run_leaves_is_small_and_holds_no_widget_state(executed):
    _, notebook = executed

    assert "widgets" not in notebook.metadata
    sizes = [len(json.dumps(output).encode()) for output in outputs(notebook)]
    assert max(sizes) < MOST_BYTES


@pytest.mark.slow
def test_every_view_leaves_a_picture_and_words(executed):
    _, notebook = executed
    shown = [output for output in outputs(notebook) if WIDGET in output.get("data", {})]
    views = [output.data for output in shown if not is_bar(output)]

    sources = [cell.source for cell in notebook.cells if "lmscope.watch(" in cell.source]
    assert [source.count("lmscope.watch(") for source in sources] == [1] * len(views)
    for source, data in zip(sources, views, strict=True):
        assert re.search(r"<img [^>]*alt=\"[^\"]{20,}\"", data["text/html"])
        assert "data:image/png;base64," in data["text/html"]
        assert data["text/plain"].startswith("lmscope ")
        # The picture of the end of the run, not the one that was there when the view appeared.
        has_requests = "views=" not in source
        assert ("finished at step" if has_requests else "0 running, 0 waiting") in data[
            "text/plain"
        ]
        assert not data["text/plain"].startswith("lmscope  step 0 ")


@pytest.mark.slow
def test_the_engine_answers_each_prediction_with_its_number_and_its_reason(executed):
    name, notebook = executed
    answers = {}
    for cell in code_cells(notebook):
        answer = ANSWER.match(text_of(cell))
        assert bool(answer) == cell.id.startswith("check-"), cell.id
        if answer is not None:
            answers[cell.id] = answer["engine"]
            assert (answer["mark"] == "✓") == (answer["guess"] == answer["engine"])

    predicted = [cell.id for cell in code_cells(notebook) if cell.id.startswith("predict-")]
    assert [name.replace("predict-", "check-") for name in predicted] == list(answers)
    assert answers == ANSWERS.get(name, answers)
    # Comparisons that a tutorial prints, such as those of texts, hold.
    assert "False" not in "".join(map(text_of, code_cells(notebook)))
