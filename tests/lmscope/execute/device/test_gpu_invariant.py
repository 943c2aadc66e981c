"""What only a GPU shows of batch-invariant engines: bits.

Requests are run alone first, eagerly; then in batches, in chunks, preempted, behind cached prefixes
and in graphs. Tokens and all log probabilities must be the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmscope import LLM, RequestOutput, SamplingParams
from lmscope.boundary import SchedulerOutput

NUM_REQUESTS = 24
SHARED = [(7 * place + 3) % 97 for place in range(48)]
PROMPTS = [[*SHARED[: 2 * number], number, 3 * number + 1] for number in range(NUM_REQUESTS)]
PARAMS = [
    SamplingParams(
        temperature=0.9 if number % 2 else 0.0,
        top_p=0.9 if number % 4 == 1 else 1.0,
        top_k=20 if number % 8 == 3 else -1,
        seed=number,
        max_tokens=4 + number % 9,
        logprobs=3 if number % 3 else None,
        prompt_logprobs=1 if number % 7 == 0 else None,
        repetition_penalty=1.2 if number % 5 == 0 else 1.0,
        ignore_eos=True,
    )
    for number in range(NUM_REQUESTS)
]
ENGINES: dict[str, dict[str, Any]] = {
    "batches in graphs": {},
    "eager batches": {"enforce_eager": True},
    "overlapped steps": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 29, "long_prefill_token_threshold": 7},
    "preemption": {"num_kv_blocks": 14},
    "no cached prefixes": {"enable_prefix_caching": False},
}


def load(folder: Path, dtype: str, **options: Any) -> LLM:
    settings = {"num_kv_blocks": 400, "block_size": 8, "max_num_seqs": 16, **options}
    return LLM(folder, device="cuda", dtype=dtype, batch_invariant=True, **settings)


def said(output: RequestOutput) -> tuple[Any, ...]:
    """All that a request says, as numbers that must be equal."""
    completion = output.outputs[0]
    tables = [*(completion.logprobs or []), *(output.prompt_logprobs or [])]
    return completion.token_ids, [
        table and {token: (entry.logprob, entry.rank) for token, entry in table.items()}
        for table in tables
    ]


def run(llm: LLM, numbers: range) -> list[tuple[Any, ...]]:
    prompts = [PROMPTS[number] for number in numbers]
    outputs = llm.generate(prompts, [PARAMS[number] for number in numbers], use_tqdm=False)
    return [said(output) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("kind", "vocab_size"), [("llama", 97), ("qwen3", 101), ("qwen2", 128)])
def test_a_request_says_the_same_alone_and_in_any_batch(model_folder, kind, vocab_size, dtype):
    folder = model_folder(kind, vocab_size=vocab_size)
    with load(folder, dtype, enforce_eager=True, enable_prefix_caching=False) as llm:
        alone = [run(llm, range(number, number + 1))[0] for number in range(NUM_REQUESTS)]
    for name, options in ENGINES.items():
        preempted: list[str] = []
        with load(folder, dtype, **options) as llm:
            llm.tap.on(SchedulerOutput, lambda each: preempted.extend(each.preempted_req_ids))  # noqa: B023  # called in this turn only
            for numbers in (range(NUM_REQUESTS), range(3, 16), range(NUM_REQUESTS)):
                got = run(llm, numbers)
                assert got == [alone[number] for number in numbers], name
        assert bool(preempted) == (name == "preemption")


@pytest.mark.parametrize("is_eager", [False, True])
def test_no_step_waits_for_the_device(model_folder, is_eager):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=12, ignore_eos=True)
    with load(model_folder("llama"), "bfloat16", enforce_eager=is_eager) as llm:
        llm.generate(PROMPTS[:8], params, use_tqdm=False)  # compiles, and captures
        watched: list[int] = []

        def watch(output: SchedulerOutput) -> None:
            if len(output.num_scheduled_tokens) == 8 and output.total_num_scheduled_tokens == 8:
                watched.append(output.step)
                torch.cuda.set_sync_debug_mode("error")

        try:
            with llm.tap.on(SchedulerOutput, watch):
                llm.generate(PROMPTS[:8], params, use_tqdm=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert len(watched) >= 8


def test_attention_can_be_measured_and_changes_no_bit(model_folder):
    with load(model_folder("llama"), "bfloat16") as llm:
        alone = run(llm, range(8))
        with llm.measure_attention():
            assert run(llm, range(8)) == alone
