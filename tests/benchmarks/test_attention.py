"""The benchmark of attention: it measures in one half of its runs, and reports pairs."""

from __future__ import annotations

import contextlib
import json

import attention
import pytest
import watching


class Counting:
    """An engine that counts its runs, and in how many of them somebody measured."""

    model = "counting"

    def __init__(self, model="", threads=1):
        self.steps = 0
        self.runs = []
        self.is_measured = False
        self._loop = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def call(self, function):
        return function(self)

    @property
    def step_number(self):
        return self.steps

    def reset_prefix_cache(self):
        return True

    def generate(self, prompts, params, use_tqdm):
        self.steps += params.max_tokens
        self.runs.append((len(prompts), self.is_measured))

    @contextlib.contextmanager
    def measure_attention(self):
        self.is_measured = True
        yield
        self.is_measured = False


def test_half_of_the_runs_are_measured_in_turn():
    llm = Counting()
    made = attention.measure_attention(llm, [[1, 2], [3, 4]], 5, 4, "what")

    assert len(made.with_it) == len(made.without) == 4
    measured = [is_measured for _, is_measured in llm.runs]
    assert measured.count(True) == measured.count(False) == 5, "one more pair before"
    # Neither is always first.
    assert len({tuple(measured[k : k + 2]) for k in range(0, 10, 2)}) == 2
    assert all(count == 2 for count, _ in llm.runs)


def test_the_report_has_every_pair_of_every_workload(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("lmscope.LLM", Counting)
    monkeypatch.setattr(attention, "make_encoder", lambda model: lambda text: list(text.encode()))
    out = tmp_path / "attention.json"
    arguments = ["--pairs", "2", "--workloads", "1x20", "3x20", "--out", str(out)]

    assert attention.main(arguments) == 0
    table = capsys.readouterr().out
    comparisons = [
        watching.Comparison(**each) for each in json.loads(out.read_text())["comparisons"]
    ]
    assert [each.what for each in comparisons] == [
        "measuring, 1x20 tokens",
        "measuring, 3x20 tokens",
    ]
    assert table.splitlines() == watching.table(comparisons)


def test_one_pair_is_no_measurement(capsys):
    with pytest.raises(SystemExit):
        attention.main(["--pairs", "1"])
    assert "--pairs must be at least 2" in capsys.readouterr().err
