"""The whole engine with the Triton back end gives what it gives with torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmscope import LLM, SamplingParams
from lmscope.execute import device_runner, model_runner
from lmscope.execute.cuda_graphs import DecodeGraphs

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import GREEDY, IS_INTERPRETED, MIXED, POOL, A, Run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_chunks_decodes_preemptions_and_draws_give_the_same_tokens(
    model_folder, in_flight, asynchronous
):
    folder = model_folder("llama")
    expected = Run(folder, "torch", MIXED)
    run = Run(folder, "triton", MIXED, async_scheduling=asynchronous)

    assert run.tokens == expected.tokens
    assert "Triton" in str(run.plan.attention)
    assert expected.num_preemptions > 0
    if not asynchronous:
        assert run.num_preemptions == expected.num_preemptions
    assert any(1 < n < 12 for each in run.scheduled for n in each.num_scheduled_tokens.values())


def test_all_log_probabilities_are_within_a_thousandth(model_folder):
    folder = model_folder("qwen3")
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=6,
            ignore_eos=True,
            logprobs=20,
            prompt_logprobs=3,
            repetition_penalty=penalty,
        )
        for penalty in (1.0, 1.3, 1.0, 1.1)
    ]
    expected = Run(folder, "torch", params)
    run = Run(folder, "triton", params, async_scheduling=True)

    assert run.tokens == expected.tokens
    for mine, other in zip(run.logprobs, expected.logprobs, strict=True):
        for position, wanted in zip(mine, other, strict=True):
            for token_id, logprob in wanted.items():
                assert position[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_windows_and_a_soft_cap_and_shared_prefixes(model_folder, asynchronous):
    folder = model_folder(
        "gemma2",
        sliding_window=7,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=16,
    )
    prompts = [A, A, [*A[:16], 8, 9]]
    short = [GREEDY[0].replace(max_tokens=5)] * 3
    roomy = {"num_kv_blocks": 40, "max_num_seqs": 1}  # one by one, so that later ones hit
    expected = Run(folder, "torch", short, prompts=prompts, **roomy)
    run = Run(folder, "triton", short, prompts=prompts, async_scheduling=asynchronous, **roomy)

    assert run.tokens == expected.tokens
    firsts = [new for each in run.scheduled for new in each.scheduled_new_reqs]
    assert [each.num_computed_tokens for each in firsts] == [0, 16, 16]


def test_greedy_rows_beside_penalised_ones_while_tokens_are_in_flight(model_folder, in_flight):
    """The host must wait for tokens that a penalty counts, and for no others."""
    folder = model_folder("llama")
    params = [
        *MIXED[:3],
        SamplingParams(temperature=0.0, presence_penalty=1.5, max_tokens=5, ignore_eos=True),
    ]
    expected = Run(folder, "torch", params, num_kv_blocks=60)
    run = Run(folder, "triton", params, num_kv_blocks=60, async_scheduling=True)

    assert run.tokens == expected.tokens


@pytest.mark.skipif(not IS_INTERPRETED, reason="graphs of a GPU are tested in test_gpu.py")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_padded_batches_of_graphs_give_the_same_tokens(
    model_folder, in_flight, graphs, asynchronous
):
    folder = model_folder("llama")
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 7, 12, 5)
    ]
    expected = Run(folder, "torch", params)
    run = Run(folder, "triton", params, async_scheduling=asynchronous)

    assert run.tokens == expected.tokens
    assert (4,) in graphs  # three requests ran in the graph of four


@pytest.mark.skipif(not IS_INTERPRETED, reason="the torch path measures on a CPU only")
@pytest.mark.parametrize("block_size", [4, 5])
def test_attention_mass_is_that_of_torch(model_folder, graphs, in_flight, block_size, monkeypatch):
    """With blocks of 5 tokens the decode kernel cannot say it, and keys are read again."""
    monkeypatch.setattr(model_runner, "BY_HEAD_INTERVAL_S", 0.0)
    folder = model_folder("llama")
    options = {"block_size": block_size, "num_kv_blocks": 60, "measures": True}
    short = [GREEDY[0].replace(max_tokens=5)] * 4
    expected = Run(folder, "torch", short, **options)
    run = Run(folder, "triton", short, **options)

    assert run.tokens == expected.tokens
    assert [each.step for each in run.ran] == [each.step for each in expected.ran]
    for mine, other in zip(run.ran, expected.ran, strict=True):
        assert mine.attention_mass.keys() == other.attention_mass.keys()
        for request_id, shares in other.attention_mass.items():
            assert mine.attention_mass[request_id] == pytest.approx(shares, abs=1e-5)
            assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert {each.device_duration_s for each in run.ran} == {None}  # no GPU to time
    assert run.by_head.keys() == expected.by_head.keys()
    for request_id, heads in expected.by_head.items():
        torch.testing.assert_close(
            torch.from_numpy(run.by_head[request_id]), torch.from_numpy(heads), atol=1e-5, rtol=0
        )


@pytest.mark.skipif(not IS_INTERPRETED, reason="the stand-in for graphs is for a CPU")
def test_by_head_is_kept_rarely_and_by_graphs_of_its_own(model_folder, graphs, monkeypatch):
    """The clock stands still, so one step of the measurement keeps it and no other."""
    folder = model_folder("llama")
    kinds = []
    capture = DecodeGraphs.__call__

    def note(self: Any, num_reqs: int, num_blocks: int, kind: Any = None) -> Any:
        kinds.append(kind)
        return capture(self, num_reqs, num_blocks, kind)

    monkeypatch.setattr(DecodeGraphs, "__call__", note)
    init = device_runner.DeviceRunner.__init__

    def with_clock(self: Any, *args: Any) -> None:
        init(self, *args)
        self._clock = lambda: 7.0

    monkeypatch.setattr(device_runner.DeviceRunner, "__init__", with_clock)
    short = [GREEDY[0].replace(max_tokens=5)]
    prompts = [[3]]  # its first step is one row, as of a decoding request
    run = Run(folder, "triton", short, prompts=prompts, num_kv_blocks=60, measures=True)

    assert kinds == ["heads", "mean", "mean", "mean", "mean"]
    assert all(each.attention_mass for each in run.ran if each.req_ids)
    (heads,) = run.by_head.values()
    assert heads.shape == (2, 6, 1)


def test_logits_that_are_no_numbers_end_a_request_with_an_error(model_folder, in_flight):
    folder = model_folder("llama")
    with LLM(
        folder,
        attention_backend="triton",
        dtype="float32",
        exact=True,
        async_scheduling=True,
        **POOL,
    ) as llm:
        llm.module.lm_head.weight.data[0, 0] = torch.nan
        (output,) = llm.generate({"prompt_token_ids": A}, GREEDY[0], use_tqdm=False)

    assert output.outputs[0].finish_reason == "error"
