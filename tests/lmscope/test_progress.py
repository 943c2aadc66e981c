"""The bar of `generate`: right totals, text that stays, and silence when it is off."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from lmscope import LLM, SamplingParams
from lmscope.progress import generate_bar


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(
        "s", execute="scripted", script=lambda request_id, position: 97, num_kv_blocks=64
    ) as engine:
        yield engine


def last_line(text: str) -> str:
    return text.strip().replace("\r", "\n").splitlines()[-1]


def test_needs_no_file_number_of_the_screen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    llm.generate(["a"], SamplingParams(max_tokens=5))
    assert "1/1" in last_line(written.getvalue())


def test_counts_prompts_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=5))

    line = last_line(capsys.readouterr().err)
    assert line.startswith("Processed prompts: 100%")
    assert "3/3" in line
    assert "15 tokens, " in line
    assert "tokens/s" in line


@pytest.mark.parametrize("prompts", [["a", "b"], []])
def test_off_is_silent(llm: LLM, capsys: pytest.CaptureFixture[str], prompts: list[str]) -> None:
    assert len(llm.generate(prompts, SamplingParams(max_tokens=5), use_tqdm=False)) == len(prompts)
    assert capsys.readouterr().err == ""


def test_no_prompts_have_no_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert llm.generate([]) == []
    assert capsys.readouterr().err == ""


class FakeStream:
    def __init__(self) -> None:
        self.finished = False
        self.num_finished = 0
        self.num_tokens = 0
        self.sampling_params = SamplingParams()

    def end(self, num_tokens: int) -> None:
        self.finished, self.num_finished, self.num_tokens = True, 1, num_tokens


def test_u6_totals_are_right_with_several_samples(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], SamplingParams(n=3, max_tokens=7))

    line = last_line(capsys.readouterr().err)
    assert "6/6" in line
    assert "42 tokens" in line


def test_samples_count_while_others_of_their_prompt_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream: Any = FakeStream()
    stream.sampling_params = SamplingParams(n=3)
    with generate_bar([stream], True):
        stream.num_finished, stream.num_tokens = 2, 9
    line = last_line(capsys.readouterr().err)
    assert "2/3" in line
    assert "9 tokens" in line


def test_what_was_interrupted_keeps_its_count(capsys: pytest.CaptureFixture[str]) -> None:
    streams: Any = [FakeStream() for _ in range(4)]
    streams[0].end(num_tokens=3)
    streams[1].num_tokens = 2
    with pytest.raises(KeyboardInterrupt), generate_bar(streams, True):
        raise KeyboardInterrupt
    line = last_line(capsys.readouterr().err)
    assert "1/4" in line
    assert "5 tokens" in line


def test_writes_a_few_times_a_second_however_often_it_is_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    streams: Any = [FakeStream()]
    with generate_bar(streams, True) as update:
        for _ in range(5_000):
            update()
    assert capsys.readouterr().err.count("\r") < 60


@pytest.mark.slow
def test_in_a_notebook_the_bar_ends_as_text_and_leaves_no_widget() -> None:
    cells = (
        "import ipywidgets.widgets.widget as models\n"
        "from lmscope import LLM, SamplingParams\n"
        "llm = LLM('s', execute='scripted', script=lambda i, p: 97, num_kv_blocks=64)\n"
        "before = len(models._instances)",
        "out = llm.generate(['a', 'b', 'c'], SamplingParams(max_tokens=5))",
        "out = llm.generate(['a', 'b', 'c'], SamplingParams(max_tokens=5), use_tqdm=False)",
        "print(len(models._instances) - before)\nllm.close()",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3", store_widget_state=False).execute()

    (output,) = notebook.cells[1].outputs
    assert set(output.data) == {"text/plain"}
    assert "3/3" in output.data["text/plain"]
    assert "15 tokens" in output.data["text/plain"]
    assert "HBox" not in output.data["text/plain"]
    assert notebook.cells[2].outputs == []
    assert notebook.cells[3].outputs[0].text == "0\n"
