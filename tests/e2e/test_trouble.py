"""Browsers that close, hide, restart or know no subshells: the engine never waits for one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Lab, Notebook

# A step of the script takes 10 ms, so that a run outlasts what a test does beside it.
ENGINE = (
    "import gc, time\n"
    "import ipywidgets.widgets.widget as models\n"
    "from lmscope import LLM, SamplingParams, watch\n"
    "from lmscope_widgets.pump import default_pump\n"
    "def say(request_id, position):\n"
    "    time.sleep(0.01)\n"
    "    return 97 + position % 26\n"
    "llm = LLM('scripted', execute='scripted', script=say, block_size=4, num_kv_blocks=512)\n"
    "def start(tokens):\n"
    "    return llm.submit('Once upon a time', SamplingParams(max_tokens=tokens))\n"
    "def counts():\n"
    "    gc.collect()\n"
    "    feeds = default_pump()._feeds\n"
    "    pages = sum(feed.num_pages for feed in feeds)\n"
    "    print(len(feeds), pages, len(llm.tap._subscriptions), len(models._instances))\n"
)
TROUBLE = (
    ENGINE,
    "view = watch(llm)",
    "other = watch(llm, views='timeline')",
    "stream = start(2000)",
    "counts()",
    "link = view._feed._pages[0].link\nprint(link._acked_seq)",
    "while not link.is_hidden: time.sleep(0.01)",
    "step = view._feed.view.step\nwhile view._feed.view.step < step + 100: time.sleep(0.01)\n"
    "print(stream.finished, view.is_open, other.is_open)",
    "stream.abort()\nfor each in (view, other): each.close()\ncounts()\nllm.close()",
)
RESTART = (
    ENGINE,
    "view = watch(llm)",
    "stream = start(2000)",
    "stream.abort()\nview.close()\nllm.close()",
)
MUTE = (
    ENGINE,
    "view = watch(llm)",
    "stream = start(2000)",
    "before = view._feed.view.step\ntime.sleep(3)\n"
    "print(llm.gate.is_closed, view._feed.view.step > before)",
    "while llm.gate.at is None: time.sleep(0.01)\nprint(llm.gate.is_closed)",
    "llm.gate.resume()\nstream.abort()\nview.close()\nllm.close()",
)
SEVEN = (
    "from lmscope import LLM, SamplingParams, watch\n"
    "llm = LLM('demo', num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, threads=1)",
    "view = watch(llm)",
    "stream = llm.submit('Why is the sky blue?', SamplingParams(max_tokens=700, ignore_eos=True))",
    "import time\n"
    "while llm.gate.at is None: time.sleep(0.01)\n"
    "print(llm.gate.is_closed, stream.finished)",
    "llm.gate.resume()\nstream.abort()\nview.close()\nllm.close()",
)
VIEWS = "() => (window.__lmscope_views ?? []).map((view) => view.lmscopeTest)"
ERRORS = f"() => ({VIEWS})().flatMap((view) => view.errors)"
DREW = f"([count, least]) => {{ const views = ({VIEWS})();\
  return views.length === count && views.every((view) => view.drawn > least); }}"


def drew(notebook: Notebook, count: int, least: int = 2) -> None:
    """Wait until there are so many views, and each has drawn more frames than that."""
    notebook.page.wait_for_function(DREW, arg=[count, least])


def reopen(lab: Lab, notebook: Notebook, name: str) -> Notebook:
    """Close the tab of a notebook, whose kernel goes on, and open it again."""
    notebook.page.close()
    return lab.open_again(name)


def test_views_share_one_stream_and_neither_a_hidden_page_nor_a_closed_tab_stops_it(
    lab: Lab,
) -> None:
    notebook = lab.open("trouble.ipynb", TROUBLE)
    for index in range(4):
        notebook.run(index)
    drew(notebook, 2)
    feeds, pages, listeners, models = map(int, notebook.run(4).split())
    assert (feeds, pages, listeners) == (1, 2, 1)

    # Run again, the cell closes the view it made before.
    for _ in range(3):
        notebook.run(1)
        drew(notebook, 2)
    assert notebook.run(4).split() == list(map(str, (1, 2, 1, models)))

    notebook.run(5)
    notebook.page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {configurable: true, value: true});"
        "  document.dispatchEvent(new Event('visibilitychange')); }"
    )
    notebook.run(6)
    assert notebook.run(7) == "False True True\n"
    assert notebook.page.evaluate(ERRORS) == notebook.errors == []

    notebook = reopen(lab, notebook, "trouble.ipynb")
    assert notebook.run(7) == "False True True\n"
    # One of the views is shown in the page that came back, and is told everything.
    assert int(notebook.run(5)) > 0
    assert notebook.run(8).split()[:3] == ["0", "0", "0"]
    assert notebook.errors == []


def test_a_restarted_kernel_leaves_the_picture_in_grey_and_the_cells_run_again(lab: Lab) -> None:
    notebook = lab.open("restart.ipynb", RESTART)
    page: Any = notebook.page
    for index in range(3):
        notebook.run(index)
    drew(notebook, 1)

    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    )
    page.wait_for_selector(".lms.lms-stale")

    for index in range(3):
        notebook.run(index)
    drew(notebook, 1)
    assert page.locator(".lms.lms-stale").count() == 0
    notebook.run(3)
    assert page.evaluate(ERRORS) == notebook.errors == []


def test_without_subshells_a_click_waits_for_the_cell_says_so_and_is_done_after_it(
    lab: Lab,
) -> None:
    notebook = lab.open("mute.ipynb", MUTE)
    page: Any = notebook.page
    # As front ends do that name no subshell in their messages.
    page.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
        ".commsOverSubshells = 'disabled'; }"
    )
    for index in range(3):
        notebook.run(index)
    drew(notebook, 1)

    notebook.start(3)
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
        " === 'busy'"
    )
    page.locator(".lms .lms-d-pause").first.click()
    page.wait_for_selector(".lms :text('cell is running: use Interrupt')")
    notebook.wait(3)
    # The engine ran on, since nobody had told it.
    assert notebook.text(3) == "False True\n"
    assert notebook.run(4) == "True\n"
    page.wait_for_selector(".lms .lms-pill[data-phase='paused']")
    assert page.locator(".lms :text('use Interrupt')").count() == 0
    notebook.run(5)
    assert page.evaluate(ERRORS) == notebook.errors == []


def test_in_notebook_7_pixels_change_and_a_click_pauses_the_engine(
    lab: Lab, demo_model: Path
) -> None:
    notebook = lab.open("seven.ipynb", SEVEN, app="notebooks")
    page: Any = notebook.page
    assert page.evaluate("() => window.jupyterapp.name") == "Jupyter Notebook"
    notebook.run(0)
    # It starts with errors of its own, before there is any view.
    of_its_own = list(notebook.errors)
    notebook.run(1)
    notebook.run(2)
    drew(notebook, 1)
    canvas = page.locator(".lms canvas.lms-map").first
    seen = {canvas.evaluate("(canvas) => canvas.toDataURL()")}
    drawn = page.evaluate(VIEWS)[0]["drawn"]
    for more in range(1, 4):
        drew(notebook, 1, drawn + 2 * more)
        seen.add(canvas.evaluate("(canvas) => canvas.toDataURL()"))
    assert len(seen) > 1

    page.locator(".lms .lms-d-pause").first.click()
    assert notebook.run(3) == "True False\n"
    page.wait_for_selector(".lms .lms-pill[data-phase='paused']")
    notebook.run(4)
    assert page.evaluate(ERRORS) == []
    assert notebook.errors == of_its_own
