"""The arithmetic of the price of batch-invariant mode, and a run of it."""

from __future__ import annotations

import invariant
import pytest

STEP = invariant.Workload("a step", 2, 4, 6)


def test_each_mode_is_first_in_every_other_pair():
    order = []

    def run(name, seconds):
        def run_one(workload):
            assert workload is STEP
            order.append(name)
            return seconds

        return run_one

    pairs = invariant.measure(STEP, [run("default", 1.0), run("invariant", 1.5)], 3)

    assert pairs == [(1.0, 1.5)] * 3
    assert order == ["invariant", "default", "default", "invariant", "invariant", "default"]


def test_ratios_are_taken_within_pairs():
    # The machine was slow in the second pair, for both.
    *_, line = invariant.table({STEP: [(0.01, 0.02), (0.1, 0.15), (0.01, 0.015)]})
    assert line == "| a step | 10.0 ms | 20.0 ms | 1.50 | 1.50 to 2.00 |"


def test_a_run_of_both_modes_prints_a_line_for_each_workload(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40_000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prefill = invariant.Workload("a prefill", 1, 30, 1)
    monkeypatch.setattr(invariant, "WORKLOADS", (STEP, prefill))

    assert invariant.main(["--model", str(tmp_path), "--pairs", "1"]) == 0

    printed = capsys.readouterr()
    assert [line.split(" |")[0] for line in printed.out.splitlines()[2:]] == [
        "| a step",
        "| a prefill",
    ]
    assert "batch-invariant forward" in printed.err
