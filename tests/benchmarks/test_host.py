"""What a step costs beside the model: what is replaced, what is counted, and the arithmetic."""

from __future__ import annotations

import json

import host
import pytest
from engine_steps import step_us, steps_of

from lmscope import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(demo_model):
    with LLM(str(demo_model), threads=1, num_kv_blocks=64) as llm:
        yield llm


def test_the_model_is_replaced_and_everything_else_runs(llm):
    host._replace_model(llm)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first, second = llm.generate(["Hello", "The capital of"], params, use_tqdm=False)
    # Its answers go round: what the second request says now, the first one says next.
    said, next_said = first.outputs[0].token_ids, second.outputs[0].token_ids
    assert len(set(said)) == 5
    assert said[1:] == next_said[:-1]
    assert first.outputs[0].text


def test_steps_and_parts_are_counted_and_nothing_stays_wrapped(llm):
    host._replace_model(llm)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def work():
        host._generate(llm, params, 3)

    assert steps_of(llm, work) >= 6
    assert step_us(llm, work) > 0
    with host._timed_parts(llm) as parts:
        work()
    assert parts.keys() == set(host.PARTS)
    assert min(parts.values()) > 0
    before = dict(parts)
    work()
    assert parts == before


def costs(*medians):
    return {
        count: ([us] * 3, dict.fromkeys(host.PARTS, us / 5))
        for count, us in zip((1, 64), medians, strict=True)
    }


@pytest.mark.parametrize(
    ("medians", "words", "status"),
    [((300, 1500), ["met", "met"], 0), ((301, 1400), ["MISSED", "met"], 1)],
)
def test_goals_are_for_one_request_and_for_64(medians, words, status):
    lines, given = host.verdict(costs(*medians))
    assert [line.split(": ")[1].split(",")[0] for line in lines] == words
    assert given == status


def test_the_table_has_a_line_for_each_number_of_requests():
    lines = host.table({"greedy": costs(100, 500)})
    assert lines[2:] == [
        "| greedy | 1 | 100, 100 to 100 | 20 | 20 | 20 | 20 | 20 |",
        "| greedy | 64 | 500, 500 to 500 | 100 | 100 | 100 | 100 | 100 |",
    ]


def test_a_run_writes_down_every_measurement(demo_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host, "_NUM_OUTPUT_TOKENS", 4)
    monkeypatch.setattr(host, "GOALS_MS", {2: 1e6})
    out = tmp_path / "host.json"
    arguments = ["--model", str(demo_model), "--rounds", "1", "--requests", "2"]
    assert host.main([*arguments, "--out", str(out)]) == 0
    assert "2 requests: met" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["step_us"].keys() == {"greedy", "random", "logprobs", "penalties"}
