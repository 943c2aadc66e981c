"""The whole engine with the Triton back end gives what it gives with torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput, SchedulerOutput
from lmscope.execute import device_runner, model_runner
from lmscope.execute.cuda_graphs import DecodeGraphs
from lmscope.execute.pending_output import Landing

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
A = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11]
PROMPTS = [A, [77], [*A[:17], 60, 61, 62], [3, 4, 5]]
# A pool of 15 usable blocks holds 60 tokens, fewer than the requests come to.
POOL = {"num_kv_blocks": 16, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4}
# Rows that are drawn, filtered, penalised and asked for log probabilities, side by side.
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=2.0, seed=-(1 << 40), max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=5, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=6, top_p=0.8, min_p=0.001, max_tokens=12, ignore_eos=True),
]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4


class Run:
    """What one engine gave: tokens and log probabilities of each request, and its structs."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        params: list[SamplingParams],
        measures: bool = False,
        prompts: list[list[int]] = PROMPTS,
        **options: Any,
    ) -> None:
        self.scheduled: list[SchedulerOutput] = []
        self.ran: list[ModelRunnerOutput] = []
        with LLM(
            folder,
            attention_backend=backend,
            device="cpu" if IS_INTERPRETED or backend == "torch" else "cuda",
            dtype="float32",
            threads=1,
            exact=True,
            **{**POOL, **options},
        ) as llm:
            self.plan = llm.plan
            llm.tap.on(SchedulerOutput, self.scheduled.append)
            llm.tap.on(ModelRunnerOutput, self.ran.append)
            measure = llm.measure_attention(by_head=True) if measures else None
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            self.by_head = measure.by_head() if measure is not None else {}
        self.tokens = [each.outputs[0].token_ids for each in outputs]
        self.logprobs = [each.outputs[0].logprobs for each in outputs]
        self.errors = [each.outputs[0].finish_reason for each in outputs]

    @property
    def num_preemptions(self) -> int:
        return sum(len(each.preempted_req_ids) for each in self.scheduled)


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are nowhere to be seen until somebody waits for them, as on a busy device."""
    has_waited: set[int] = set()
    copy, wait = Landing.copy, Landing.wait

    def copy_unseen(self: Landing, *args: Any) -> None:
        has_waited.discard(id(self))
        copy(self, *args)

    def wait_and_see(self: Landing) -> None:
        wait(self)
        has_waited.add(id(self))

    monkeypatch.setattr(Landing, "copy", copy_unseen)
    monkeypatch.setattr(Landing, "wait", wait_and_see)
    monkeypatch.setattr(Landing, "is_here", lambda self: id(self) in has_waited)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Graphs on a CPU, which run again what they were captured from; the sizes that ran."""
    replayed = []

    class Again:
        def __init__(self, call: Callable[[], Any], result: Any) -> None:
            self.call, self.result = call, result

        def replay(self) -> None:
            replayed.append(tuple(self.result.logits.shape[:1]))
            again = self.call()
            self.result.logits.copy_(again.logits)
            if again.mass is not None:
                self.result.mass.share.copy_(again.mass.share)
                for mine, new in zip(self.result.mass.layers, again.mass.layers, strict=True):
                    mine.copy_(new)

    def capture(call: Callable[[], Any]) -> Any:
        result = call()
        return Again(call, result), result

    init = device_runner.DeviceRunner.__init__

    def with_graphs(self: Any, *args: Any) -> None:
        init(self, *args)
        self._graphs = DecodeGraphs(self._run_decode, 4, self._max_blocks, capture)

    monkeypatch.setattr(device_runner.DeviceRunner, "__init__", with_graphs)
    return replayed


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
