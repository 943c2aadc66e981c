"""What only a GPU shows: graphs, no waiting inside a step, and memory that comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput, SchedulerOutput
from lmscope.execute import model_runner

A = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11]
PROMPTS = [{"prompt_token_ids": A[: 3 + i]} for i in range(8)]


def load(folder, **options) -> LLM:
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": 16,
        "num_kv_blocks": 200,
        "max_num_seqs": 8,
        **options,
    }
    return LLM(folder, **settings)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def tokens_of(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [each.outputs[0].token_ids for each in outputs]


@contextmanager
def no_waiting(llm: LLM) -> Iterator[list[int]]:
    """Torch raises at each implicit wait from the third step on; the steps so watched."""
    steps: list[int] = []

    def watch(output: SchedulerOutput) -> None:
        if len(output.num_scheduled_tokens) == 8 and output.step > 3:
            steps.append(output.step)
            torch.cuda.set_sync_debug_mode("error")

    try:
        with llm.tap.on(SchedulerOutput, watch):
            yield steps
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_graphs_and_eager_steps_give_the_tokens_of_a_cpu(model_folder, kind, asynchronous):
    folder = model_folder(kind)
    with LLM(folder, device="cpu", dtype="float32", num_kv_blocks=200, exact=True) as llm:
        expected = tokens_of(llm, greedy(20))
    for is_eager in (True, False):
        with load(folder, enforce_eager=is_eager, async_scheduling=asynchronous) as llm:
            assert tokens_of(llm, greedy(20)) == expected
            # Again, now that all graphs are there.
            assert tokens_of(llm, greedy(20)) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_draws_are_the_same_in_graphs_and_without(model_folder, dtype):
    params = SamplingParams(
        temperature=1.0, top_k=30, top_p=0.9, seed=4, max_tokens=16, ignore_eos=True
    )
    results = []
    for is_eager in (True, False):
        with load(model_folder("qwen3"), dtype=dtype, enforce_eager=is_eager) as llm:
            assert "lean" in str(llm.plan.body)
            results.append(tokens_of(llm, params))

    assert results[0] == results[1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_no_step_waits_for_the_device(model_folder, is_eager, asynchronous):
    with load(model_folder("llama"), enforce_eager=is_eager, async_scheduling=asynchronous) as llm:
        tokens_of(llm, greedy(12))  # compiles, and captures
        with no_waiting(llm) as steps:
            tokens_of(llm, greedy(12))

    assert len(steps) >= 8


@pytest.mark.parametrize("by_head", [False, True])
def test_watching_what_blocks_receive_does_not_wait_either(model_folder, monkeypatch, by_head):
    monkeypatch.setattr(model_runner, "BY_HEAD_INTERVAL_S", 0.0)
    seen: list[ModelRunnerOutput] = []
    with load(model_folder("llama"), async_scheduling=True) as llm:
        llm.tap.on(ModelRunnerOutput, seen.append)
        with llm.measure_attention(by_head=by_head):
            tokens_of(llm, greedy(12))
            seen.clear()
            with no_waiting(llm) as steps:
                tokens_of(llm, greedy(12))

    assert len(steps) >= 8
    shares = [s for each in seen for s in each.attention_mass.values()]
    assert shares
    # Of each step, one that only computed a part of a prompt too.
    assert all(0 < each.device_duration_s < 60 for each in seen if each.req_ids)
    assert all(sum(each) == pytest.approx(1, abs=1e-3) for each in shares)


def test_a_closed_gate_stands_before_a_device_with_nothing_to_do(model_folder):
    with load(model_folder("llama"), async_scheduling=True) as llm:
        stream = llm.submit(PROMPTS[0], greedy(40))
        next(iter(stream))
        llm.gate.pause()
        assert torch.cuda.current_stream().query()
        llm.gate.resume()
        stream.wait()


def test_all_memory_is_back_after_close(model_folder):
    folder = model_folder("llama")
    with load(folder, num_kv_blocks=20) as llm:  # what a process keeps for ever
        tokens_of(llm, greedy(4))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    allocated = torch.cuda.memory_allocated()
    with load(folder, num_kv_blocks=None, gpu_memory_utilization=0.5) as llm:
        tokens_of(llm, greedy(12))
        held = before - torch.cuda.mem_get_info()[0]
    after = torch.cuda.mem_get_info()[0]

    assert held > torch.cuda.mem_get_info()[1] // 4
    assert torch.cuda.memory_allocated() <= allocated
    # A context may keep a few MB for kernels that it has loaded.
    assert before - after < 64 << 20


def test_a_pool_that_another_holds_is_an_error_with_numbers(model_folder):
    free, total = torch.cuda.mem_get_info()
    hog = torch.empty(int(free - 0.05 * total), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.9: of .* GB"):
            load(model_folder("llama"), num_kv_blocks=None)
    finally:
        del hog
        torch.cuda.empty_cache()


@pytest.mark.parametrize("is_checking", ["1", ""])
def test_batches_are_checked_where_the_environment_says_so(model_folder, monkeypatch, is_checking):
    monkeypatch.setenv("LMSCOPE_CHECK", is_checking)
    with load(model_folder("llama")) as llm:
        assert llm.config.check_batches is bool(is_checking)
        assert len(tokens_of(llm, greedy(4))) == 8
