"""What people report as "stuck" or "hit rate 0", small, and each explained by one call."""

from __future__ import annotations

from lmscope import LLM, SamplingParams, record


def script(request_id, position):
    return ord("A") + position % 26


def run(*prompts, max_tokens=2, **options):
    """The recording of prompts that run one after the other; a list of them runs together."""
    settings = {"execute": "scripted", "script": script, "block_size": 16, "num_kv_blocks": 64}
    params = SamplingParams(max_tokens=max_tokens)
    with LLM("s", **settings | options) as llm, record(llm) as recording:
        for prompt in prompts:
            llm.generate(prompt, params, use_tqdm=False)
    return recording


def test_hit_rate_0_on_identical_short_prompts():
    recording = run("What is 1 + 1 ?", "What is 1 + 1 ?")

    assert str(recording.provenance("1")) == (
        "Request 1, step 4: none of 15 tokens came from the cache. "
        "It missed from token 0: shorter than a block."
    )


def test_hit_rate_0_although_all_share_a_long_system_prompt():
    system = "You are a helpful assistant. Today is Monday. "
    recording = run(
        {"prompt": system + "Hello", "cache_salt": "alice"},
        {"prompt": system + "Hello", "cache_salt": "bob"},
    )

    assert str(recording.provenance("1")) == (
        "Request 1, step 4: none of 51 tokens came from the cache. "
        "It missed from token 0: other salt; 0 had filled it at 1."
    )


def test_memory_that_is_not_given_back_after_the_last_request():
    recording = run("a prompt of about forty letters and more")

    assert str(recording.block(1)) == (
        'Block 1, step 3: free, content kept; 0 filled it in step 1 "a prompt of abou". '
        "Place 63 of 63 in the free queue: allocation 63 from now evicts it, unless it is hit "
        "before. So far: handed out once, filled once, freed once; last freed by 0 in step 2."
    )


def test_a_short_request_that_is_stuck_behind_a_long_prompt():
    recording = run(["a long document " * 6, "short"], max_num_batched_tokens=16)

    assert str(recording.why("1", step=3)) == (
        "Step 3, request 1: waiting: token budget 16 spent; 0 took 16. "
        "The first cause: 0: prefill: 48 of 96 tokens so far; budget ended the chunk. "
        "It would have run with 49 more tokens of budget."
    )


def test_a_queue_that_is_stuck_behind_one_large_request():
    recording = run(["a" * 40, "b" * 40, "c" * 3], num_kv_blocks=6, max_tokens=8)

    assert str(recording.why("2", step=2)) == (
        "Step 2, request 2: waiting: behind 1, 1 ahead. "
        "The first cause: 0: decode: 1 token. "
        "It would have run at the head of the queue."
    )


def test_a_request_that_is_admitted_and_thrown_out_again_and_again():
    recording = run(["a" * 60, "b" * 60], num_kv_blocks=7, max_num_batched_tokens=16, max_tokens=16)

    assert str(recording.why("1", step=8)) == (
        "Step 8, request 1: preempted itself: needed 1 block, 0 free; gave up 2 blocks, "
        "31 computed tokens. It would have run with 1 more free block."
    )
