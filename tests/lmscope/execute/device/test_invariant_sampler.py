"""The sampler of batch-invariant engines: the same bits in any batch, and the tokens of the CPU's.

Nothing in it is a matrix product, so the interpreter can show bits here; what torch does on a GPU
in its place is said in invariant_sampler.py.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lmscope import SamplingParams
from lmscope.execute.device_inputs import Turns
from lmscope.execute.device_sampler import DeviceSampler
from lmscope.execute.invariant_sampler import InvariantSampler
from lmscope.execute.sampler import Sampler, SamplerOutput
from lmscope.execute.sampling_row import SamplingRow

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda:0")
VOCAB_SIZE = 1001  # odd: each row begins elsewhere between two multiples of 16
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2, "logprobs": 3},
    {"temperature": 1.3, "top_k": 30, "seed": 3},
    {"temperature": 1.1, "min_p": 0.01, "top_p": 0.95, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 5},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "logprobs": 0},
]


def make_sampler() -> InvariantSampler:
    draws = DeviceSampler(16, VOCAB_SIZE, DEVICE, Turns(DEVICE), batch_invariant=True)
    return InvariantSampler(VOCAB_SIZE, draws)


def make_rows() -> list[SamplingRow]:
    return [
        SamplingRow(
            request_id=str(number),
            params=SamplingParams(max_tokens=20, **kind),
            prompt_token_ids=[5, 9, number],
            output_token_ids=[7] * number,
            seed=kind.get("seed", 0),
        )
        for number, kind in enumerate(KINDS)
    ]


def make_logits(dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(len(KINDS), VOCAB_SIZE, device=DEVICE)).to(dtype)


def bits(output: SamplerOutput, row: int) -> Any:
    return output.token_ids[row], output.logprobs[row], output.errors.get(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_draws_and_says_the_same_alone_and_in_any_place(dtype):
    logits, rows = make_logits(dtype), make_rows()
    together = make_sampler().sample(logits, rows)
    order = [3, 6, 0, 5, 2, 4, 1]
    shuffled = make_sampler().sample(logits[order], [rows[i] for i in order])

    for row in range(len(rows)):
        wanted = bits(together, row)
        alone = make_sampler().sample(logits[row : row + 1], rows[row : row + 1])
        assert bits(alone, 0) == wanted
        assert bits(shuffled, order.index(row)) == wanted


def test_it_draws_and_says_what_the_sampler_of_the_cpu_does():
    logits, rows = make_logits(torch.float32), make_rows()
    expected = Sampler(VOCAB_SIZE).sample(logits.cpu(), rows)

    got = make_sampler().sample(logits, rows)

    assert got.token_ids == expected.token_ids
    for mine, other in zip(got.logprobs, expected.logprobs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.logprob_token_ids == other.logprob_token_ids
            assert mine.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-5)
            assert mine.sampled_token_ranks == other.sampled_token_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_say_the_same_in_any_chunk(dtype):
    logits = make_logits(dtype)
    targets = [3, 1000, 0, 7, 7, 500, 20]
    sampler = make_sampler()
    whole = sampler.prompt_logprobs(logits, targets, 4)

    for first, end in ((0, 1), (1, 4), (4, 7)):
        part = sampler.prompt_logprobs(logits[first:end], targets[first:end], 4)
        assert part.logprobs == whole.logprobs[first:end]
        assert part.logprob_token_ids == whole.logprob_token_ids[first:end]
    expected = logits.double().log_softmax(dim=-1)[range(7), targets]
    assert [row[0] for row in whole.logprobs] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_row_without_a_number_ends_in_an_error_and_the_others_do_not_notice():
    logits, rows = make_logits(torch.float32), make_rows()
    wanted = make_sampler().sample(logits, rows)
    logits[4, 17] = torch.nan

    got = make_sampler().sample(logits, rows)

    assert set(got.errors) == {4}
    assert "not numbers" in got.errors[4]
    for row in (0, 1, 2, 3, 5, 6):
        assert bits(got, row) == bits(wanted, row)
