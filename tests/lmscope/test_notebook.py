"""`watch` and the life of its outputs: in a shell without a kernel, and in a whole notebook."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import comm
import nbformat
import pytest
from comm.base_comm import BaseComm
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient

import lmscope
from lmscope import SamplingParams, notebook
from lmscope.llm import LLM

WIDGET = "application/vnd.jupyter.widget-view+json"


class SilentComm(BaseComm):
    def publish_msg(self, *args: object, **kwargs: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[LLM]:
    with LLM(
        "scripted",
        execute="scripted",
        script=lambda request_id, position: ord("abc"[position % 3]),
        block_size=4,
        num_kv_blocks=64,
    ) as engine:
        yield engine


class Parent:
    """What a kernel knows of the cell that runs."""

    def __init__(self) -> None:
        self.cell_id = "cell 1"

    def __call__(self) -> dict[str, Any]:
        return {"metadata": {"cellId": self.cell_id}}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, engine: LLM) -> Iterator[Any]:
    shell = InteractiveShell.instance()
    monkeypatch.setattr(comm, "create_comm", lambda **options: SilentComm(**options))
    monkeypatch.setattr(shell, "get_parent", Parent(), raising=False)
    before = set(shell.user_ns)
    shell.user_ns.update(llm=engine, lmscope=lmscope, SamplingParams=SamplingParams)
    yield shell
    notebook.unload_ipython_extension(shell)
    for name in set(shell.user_ns) - before:
        del shell.user_ns[name]


def run(shell: Any, code: str) -> list[dict[str, Any]]:
    """Run a cell; returns the bundles that it displayed, in their order."""
    with capture_output() as captured:
        shell.run_cell(code, store_history=True).raise_error()
    return [output.data for output in captured.outputs]


def test_outside_ipython_it_returns_the_view_and_shows_nothing(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "create_comm", lambda **options: SilentComm(**options))
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)
    with capture_output() as captured:
        view = lmscope.watch(engine)

    assert captured.outputs == []
    assert view.is_open
    view.close()
    assert not engine.tap.is_live


def test_shows_itself_once_and_is_one_line_as_the_value_of_its_cell(shell: Any) -> None:
    first, *rest = run(shell, "lmscope.watch(llm)")

    assert WIDGET in first
    assert '<img alt="lmscope: scripted' in first["text/html"]
    assert [set(bundle) for bundle in rest] in ([], [{"text/plain"}])


def test_the_cell_in_which_a_run_ends_writes_the_final_picture_once(shell: Any) -> None:
    run(shell, "view = lmscope.watch(llm)")
    assert run(shell, "1 + 1") == []

    (final,) = run(
        shell, "out = llm.generate('hello', SamplingParams(max_tokens=5), use_tqdm=False)"
    )
    assert "abcab" in final["text/html"]
    assert WIDGET in final
    assert run(shell, "'nothing has changed'; None") == []


def test_a_run_that_fails_also_ends_with_its_picture(shell: Any) -> None:
    run(shell, "view = lmscope.watch(llm)")
    with capture_output() as captured:
        shell.run_cell(
            "llm.generate('hello', SamplingParams(max_tokens=5), use_tqdm=False)\n1 / 0",
            store_history=True,
        )

    assert any("abcab" in output.data.get("text/html", "") for output in captured.outputs)


def test_a_cell_that_does_not_wait_leaves_the_picture_to_a_later_one(
    shell: Any, engine: LLM
) -> None:
    run(shell, "view = lmscope.watch(llm)")
    waiting = threading.Event()
    engine.tap.on(lmscope.SchedulerOutput, lambda output: waiting.wait(200))
    assert run(shell, "stream = llm.submit('hello', SamplingParams(max_tokens=5))") == []
    waiting.set()
    (final,) = run(shell, "stream.wait(200); None")

    assert "abcab" in final["text/html"]


def test_running_a_cell_again_closes_the_view_it_made_and_no_other(shell: Any) -> None:
    run(shell, "first = lmscope.watch(llm); again = lmscope.watch(llm)")
    shell.get_parent.cell_id = "cell 2"
    run(shell, "other = lmscope.watch(llm)")
    shell.get_parent.cell_id = "cell 1"
    run(shell, "view = lmscope.watch(llm)")
    names = shell.user_ns

    assert not names["first"].is_open
    assert not names["again"].is_open
    assert names["other"].is_open
    assert names["view"].is_open


def test_a_front_end_that_names_no_cells_keeps_all_views(shell: Any) -> None:
    shell.get_parent.cell_id = ""
    run(shell, "first = lmscope.watch(llm)")
    run(shell, "view = lmscope.watch(llm)")

    assert shell.user_ns["first"].is_open


def test_unloading_closes_the_views_and_leaves_their_pictures(shell: Any, engine: LLM) -> None:
    run(shell, "view = lmscope.watch(llm)")
    with capture_output() as captured:
        notebook.unload_ipython_extension(shell)

    assert [set(output.data) for output in captured.outputs] == [{"text/html", "text/plain"}]
    assert not shell.user_ns["view"].is_open
    assert not engine.tap.is_live


def test_the_magic_shows_the_engine_while_it_generates(shell: Any) -> None:
    notebook.load_ipython_extension(shell)
    shown = run(shell, "%%lmscope generate -n 4 -q --view\nhello")

    assert [WIDGET in bundle for bundle in shown] == [True, True]
    assert "abca" in shown[1]["text/html"]


def test_a_replay_shows_itself_with_a_slider_and_stays_at_its_first_struct(
    shell: Any, engine: LLM
) -> None:
    with lmscope.record(engine) as recording:
        engine.generate("hello", SamplingParams(max_tokens=5), use_tqdm=False)
    shell.user_ns["recording"] = recording
    run(shell, "player = lmscope.replay(recording)")
    first, *rest = run(shell, "player")

    assert WIDGET in first
    assert [set(bundle) for bundle in rest] in ([], [{"text/plain"}])
    player = shell.user_ns["player"]
    assert (player.position, player.is_playing) == (0, False)
    (view,) = [entry[2] for entry in notebook._Shown.of(shell)._views]
    assert set(view.commands) >= {"seek", "back", "speed", "resume", "pause", "step"}
    assert view.steps == [0, recording.steps[-1]]

    (final,) = run(shell, "player.play().wait(); None")
    assert "abcab" in final["text/html"]


def test_debug_shows_the_engine_and_closes_its_gate(shell: Any, engine: LLM) -> None:
    shown, *rest = run(shell, "dbg = lmscope.debug(llm)")
    assert WIDGET in shown
    assert rest == []
    dbg = shell.user_ns["dbg"]
    assert dbg.view.commands == ["pause", "resume", "step", "break", "unbreak"]
    assert engine.gate.is_closed

    run(shell, "stream = llm.submit('hello', SamplingParams(max_tokens=5)); dbg.step(); None")
    assert repr(dbg).startswith("<Debugger of scripted: stands at EngineCoreRequest of step 0")
    run(shell, "dbg.resume(); stream.wait(200); dbg.close()")
    assert not dbg.view.is_open


@pytest.mark.slow
def test_a_notebook_that_is_run_without_a_browser_stores_pictures_and_no_widget_state() -> None:
    cells = (
        "%load_ext lmscope\n"
        "from lmscope import LLM, SamplingParams, watch\n"
        "llm = LLM('scripted', execute='scripted', script=lambda i, p: 97 + p % 26,\n"
        "          block_size=4, num_kv_blocks=64)",
        "view = watch(llm)",
        "streams = [llm.submit(f'prompt {i}', SamplingParams(max_tokens=40)) for i in range(6)]\n"
        "for stream in streams:\n"
        "    stream.wait(120)",
        "%%lmscope generate -n 3 -o outputs -q\nbraces {x} and $y",
        "print([o.prompt for o in outputs])\nllm.close()",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3", store_widget_state=False).execute()

    assert "widgets" not in notebook.metadata
    (output,) = notebook.cells[1].outputs
    data = output.data
    assert set(data) == {WIDGET, "text/html", "text/plain"}
    assert '<img alt="lmscope: scripted' in data["text/html"]
    assert "step 4" in data["text/html"]  # the final picture and not the first
    assert "abcdefghijklmnopqrstuvwxyz" in data["text/html"]
    assert "prompt 5" in data["text/html"]
    assert sum(len(str(value).encode()) for value in data.values()) < 50_000
    assert notebook.cells[4].outputs[0].text == "['braces {x} and $y']\n"
