"""The arithmetic of the start times, and that failing processes are heard of."""

from __future__ import annotations

import json

import pytest
import start


def test_quartiles_are_those_of_the_values_themselves():
    assert start.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)
    assert start.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_the_ratio_is_taken_within_pairs():
    # The machine was slow in the second pair, for both.
    seconds = {"import lmscope": [0.1, 1.0, 0.2], "import pandas": [0.2, 2.0, 0.4]}
    *_, last = start.table(seconds)
    assert last == "| import lmscope / import pandas | 3 | 0.500 | 0.500 to 0.500 |"


def test_what_was_not_measured_has_no_line():
    assert len(start.table({"import lmscope": [], "import pandas": []})) == 2
    assert start.table({"first load": [20.0, 21.0, 22.0]})[2:] == [
        "| first load | 3 | 21.0 | 20.5 to 21.5 |"
    ]


def test_imports_are_measured_in_pairs_and_written_down(tmp_path, capsys, monkeypatch):
    order = []

    def run(code, *arguments, **environment):
        order.append(code.split("import ")[2].split()[0])
        return "0.1" if order[-1] == "lmscope" else "0.3"

    monkeypatch.setattr(start, "_run", run)
    out = tmp_path / "start.json"

    assert start.main(["--starts", "0", "--loads", "0", "--imports", "2", "--out", str(out)]) == 0

    # each first in turn, and the first pair does not count
    assert order == ["lmscope", "pandas", "pandas", "lmscope", "lmscope", "pandas"]
    assert json.loads(out.read_text())["seconds"]["import pandas"] == [0.3, 0.3]
    assert "| import pandas | 2 | 0.300 |" in capsys.readouterr().out


def test_an_import_that_is_slower_than_pandas_fails(monkeypatch):
    monkeypatch.setattr(start, "_run", lambda code, *_: "0.4" if "lmscope" in code else "0.3")
    assert start.main(["--starts", "0", "--loads", "0", "--imports", "3"]) == 1


def test_starts_are_measured_in_pairs_and_the_first_does_not_count(demo_model, monkeypatch):
    order = []

    def run(code, *arguments, **environment):
        order.append("theirs" if code == start.TRANSFORMERS else "ours")
        assert arguments == (("1", str(demo_model)) if order[-1] == "theirs" else ("1",))
        assert environment == {"OMP_NUM_THREADS": "1"}
        now = start.time.monotonic()
        peak = 1e6 * len(order)  # KiB, or bytes on macOS
        return json.dumps({"loaded": now, "answered": now + 1, "cpu": len(order), "peak": peak})

    monkeypatch.setattr(start, "_run", run)
    monkeypatch.setattr(start.sys, "platform", "linux")
    seconds, megabytes = start.measure_starts(2, threads=1)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert seconds[f"{start.OURS}, CPU time"] == [4, 5]
    assert seconds[f"{start.THEIRS}, CPU time"] == [3, 6]
    assert megabytes == {
        f"{start.OURS}, peak memory": [4096, 5120],
        f"{start.THEIRS}, peak memory": [3072, 6144],
    }
    assert sorted(start.memory_table(megabytes)[3:]) == [
        f"| {start.OURS}, peak memory | 2 | 4608 | 4352 to 4864 |",
        f"| {start.THEIRS}, peak memory | 2 | 4608 | 3840 to 5376 |",
    ]
    assert start.memory_table({}) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [(5.9, 5.9, ["met", "met"]), (5.9, 5.8, ["MISSED", "met"]), (6.0, 7.0, ["met", "MISSED"])],
)
def test_a_start_has_two_goals(ours, theirs, words):
    lines, status = start.verdict({start.OURS: [ours], start.THEIRS: [theirs]})
    assert [line.split(":")[0] for line in lines] == words
    assert status == int("MISSED" in words)


def test_the_code_that_starts_transformers_runs(demo_model):
    took = start._start(start.TRANSFORMERS, 1, str(demo_model))
    assert 0 < took[""] < took[", to the first token"]
    assert 100 < took["peak memory in MB"] < 100_000


def test_a_failing_process_says_why():
    with pytest.raises(RuntimeError, match="no_such_module"):
        start._run("import no_such_module")
