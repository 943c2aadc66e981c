"""What a step asks of the host grows with the scheduled requests and with nothing else.

Counted are calls, of Python and of C functions, on the engine thread. The model is replaced by a
function, so that all of them are the engine's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import host
import pytest

from lmscope import LLM, SamplingParams

KINDS = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.8, "top_p": 0.9},
    "logprobs": {"temperature": 0, "logprobs": 5},
}


@pytest.fixture(scope="module")
def llm(demo_model) -> Iterator[LLM]:
    with LLM(str(demo_model), threads=1, num_kv_blocks=200, max_num_seqs=64) as llm:
        host._replace_model(llm)
        yield llm


@contextmanager
def counted_calls(llm: LLM) -> Iterator[list[int]]:
    """The number of calls in each step, and in making text of it, while this is open."""
    counts: list[int] = []
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    def counted(function: Callable[..., object], is_last: bool) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            nonlocal num_calls
            sys.setprofile(count)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)
                if is_last:
                    counts.append(num_calls)
                    num_calls = 0

        return run

    loop = llm._loop
    on_outputs = loop._on_outputs

    def begin(core) -> None:
        core.step = counted(core.step, is_last=False)
        loop._on_outputs = counted(on_outputs, is_last=True)

    def end(core) -> None:
        del core.step
        loop._on_outputs = on_outputs

    loop.call(begin)
    try:
        yield counts
    finally:
        loop.call(end)


def calls_of_a_decode(llm: LLM, count: int, num_output_tokens: int = 12, **params) -> int:
    """Calls of the step of `count` requests that takes fewest: no block begins or gets full."""
    sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, **params)
    prompts = [{"prompt_token_ids": [1 + index, 2, 3, 4]} for index in range(count)]
    llm.reset_prefix_cache()
    with counted_calls(llm) as counts:
        llm.generate(prompts, sampling, use_tqdm=False)
    return min(counts[1:num_output_tokens])


def test_each_request_takes_as_many_calls_as_any_other(llm):
    calls = {count: calls_of_a_decode(llm, count, temperature=0) for count in (2, 4, 8, 16, 32)}
    of_one = (calls[4] - calls[2]) // 2
    assert calls == {count: calls[2] + (count - 2) * of_one for count in calls}


# How often the likeliest tokens are looked for, and how many make a character, differs a little.
@pytest.mark.parametrize(("kind", "most"), [("greedy", 38), ("random", 55), ("logprobs", 58)])
def test_a_request_more_takes_a_few_dozen_calls(llm, kind, most):
    few, many = (calls_of_a_decode(llm, count, **KINDS[kind]) for count in (4, 32))
    assert (many - few) / 28 <= most


def test_a_long_output_takes_no_more_than_a_short_one(llm):
    assert calls_of_a_decode(llm, 4, 200, temperature=0) == calls_of_a_decode(llm, 4, temperature=0)
