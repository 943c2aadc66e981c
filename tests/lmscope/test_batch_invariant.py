"""batch_invariant=True: tokens and log probabilities bit for bit, whatever else is in the batch.

Forty requests over a tiny Llama of awkward shapes (9 query heads, 3 KV heads, sizes that no vector
divides) are run alone first; then random batches of them go through engines that chunk, preempt
and hit the cache. `make fuzz` runs a thousand batches on one thread and a thousand on two.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lmscope import LLM, SamplingParams
from lmscope.boundary import SchedulerOutput

pytest.importorskip("torch")

VOCAB_SIZE = 509
SHAPES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 90,
    "intermediate_size": 101,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
# What the engines of random batches differ in. 16 requests of up to 74 tokens take 160 blocks.
ENGINES = (
    {"num_kv_blocks": 200, "max_num_batched_tokens": 512},
    {"num_kv_blocks": 200, "max_num_batched_tokens": 17, "async_scheduling": True},
    {"num_kv_blocks": 14, "max_num_batched_tokens": 64},
    {"num_kv_blocks": 30, "max_num_batched_tokens": 29, "long_prefill_token_threshold": 7},
    {"num_kv_blocks": 40, "enable_prefix_caching": False},
)
NUM_REQUESTS = 40
IS_FUZZ = settings().max_examples >= 1000


def make_requests() -> list[tuple[dict[str, list[int]], SamplingParams]]:
    """The same in every run: a third shares the beginning of another, half is drawn."""
    rng = random.Random(11)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(48)]
    requests = []
    for number in range(NUM_REQUESTS):
        head = shared[: rng.choice((8, 24, 48))] if number % 3 == 0 else []
        prompt = head + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))]
        params = SamplingParams(
            temperature=0.9 if number % 2 else 0,
            top_p=0.9 if number % 4 == 1 else 1.0,
            top_k=20 if number % 4 == 3 else -1,
            seed=number,
            max_tokens=rng.randint(1, 12),
            logprobs=rng.randint(0, 5),
            prompt_logprobs=1 if number % 7 == 0 else None,
            repetition_penalty=1.2 if number % 5 == 0 else 1.0,
            ignore_eos=True,
        )
        requests.append(({"prompt_token_ids": prompt}, params))
    return requests


REQUESTS = make_requests()


def bits(output):
    """All that a request says, as numbers that must be equal."""
    completion = output.outputs[0]
    tables = [*completion.logprobs, *(output.prompt_logprobs or [])]
    return completion.token_ids, [
        table and {token: (entry.logprob, entry.rank) for token, entry in table.items()}
        for table in tables
    ]


def run(llm, numbers):
    """What the requests of these numbers say when they are run together."""
    prompts, params = zip(*(REQUESTS[number] for number in numbers), strict=True)
    return [bits(o) for o in llm.generate(list(prompts), list(params), use_tqdm=False)]


class Engines:
    """Engines over one model, made when they are asked for."""

    def __init__(self, folder: str, batch_invariant: bool = True) -> None:
        options = {"threads": 1, "block_size": 8, "batch_invariant": batch_invariant}
        self.alone = LLM(folder, num_kv_blocks=40, enable_prefix_caching=False, **options)
        self.made = {}
        self.seen = Counter()
        self.known = {}

    def get(self, index, threads):
        if (index, threads) not in self.made:
            llm = self.alone.like(
                **{"enable_prefix_caching": True, **ENGINES[index], "threads": threads}
            )
            llm.tap.on(SchedulerOutput, self.note)
            self.made[index, threads] = llm
        return self.made[index, threads]

    def note(self, output):
        self.seen["preempted"] += len(output.preempted_req_ids)
        self.seen["chunked"] += any(decision.tokens_left for decision in output.decisions)
        self.seen["cached"] += any(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)

    def wanted(self, number):
        """What a request says alone, on one thread."""
        if number not in self.known:
            self.known[number] = run(self.alone, [number])[0]
        return self.known[number]

    def different(self, numbers, index, threads):
        got = run(self.get(index, threads), numbers)
        return [n for n, each in zip(numbers, got, strict=True) if each != self.wanted(n)]

    def close(self):
        for llm in (*self.made.values(), self.alone):
            llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = tmp_path_factory.mktemp("awkward")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def engines(folder):
    made = Engines(folder)
    yield made
    made.close()


batches = st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=16)
slow = settings(suppress_health_check=[HealthCheck.too_slow])


@settings(slow, max_examples=1000 if IS_FUZZ else 60)
@given(numbers=batches, index=st.integers(0, len(ENGINES) - 1))
def test_any_batch_gives_what_each_request_gives_alone(engines, numbers, index):
    assert engines.different(numbers, index, threads=1) == []


@settings(slow, max_examples=1000 if IS_FUZZ else 6)
@given(numbers=batches, index=st.integers(0, len(ENGINES) - 1))
def test_any_batch_on_two_threads_gives_what_one_gives(engines, numbers, index):
    assert engines.different(numbers, index, threads=2) == []


def test_batches_preempt_chunk_and_hit_the_cache(engines):
    engines.seen.clear()
    rng = random.Random(3)
    for index in range(len(ENGINES)):
        numbers = rng.sample(range(NUM_REQUESTS), 16)
        assert engines.different(numbers, index, threads=1) == []
    assert min(engines.seen[name] for name in ("preempted", "chunked", "cached")) > 0


def test_the_default_mode_does_notice_the_batch(folder):
    engines = Engines(folder, batch_invariant=False)
    numbers = list(range(16))
    try:
        assert engines.different(numbers, 0, threads=1)
    finally:
        engines.close()
