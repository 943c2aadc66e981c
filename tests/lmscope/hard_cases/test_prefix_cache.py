"""Hard cases of the prefix cache (C)."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest

from lmscope import SamplingParams, record
from lmscope.boundary import EngineCoreOutputs, SchedulerOutput
from lmscope.engine.block_pool import BlockPool
from lmscope.engine.prefix_hash import BlockHasher, short_hash
from lmscope.errors import GateClosedError
from lmscope.scope.view import EngineView

ONE = SamplingParams(max_tokens=1)


def run(llm, prompts, params=ONE):
    """How many prompt tokens of each came from the cache."""
    return [o.num_cached_tokens for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(("length", "hits"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_c1_only_full_blocks_are_shared_and_the_last_token_is_computed(scripted, length, hits):
    llm = scripted("ok", block_size=16)
    prompt = [[97 + n for n in range(length)]]

    assert run(llm, prompt) == [0]
    assert run(llm, prompt) == [hits]


def test_c2_a_block_that_was_handed_out_does_not_answer_to_its_old_name(scripted, endless):
    llm = scripted(endless, num_kv_blocks=8)
    first = "abcdefghijklm"
    (cold,) = llm.generate(first, SamplingParams(max_tokens=4), use_tqdm=False)
    assert run(llm, first) == [12]
    for other in ("N" * 20, "O" * 20):  # seven usable blocks, all of them written over
        run(llm, other)

    assert run(llm, first) == [0]
    assert run(llm, first) == [12]
    again = scripted(lambda i, n: endless("0", n), num_kv_blocks=8)
    (fresh,) = again.generate(first, SamplingParams(max_tokens=4), use_tqdm=False)
    assert fresh.outputs[0].token_ids == cold.outputs[0].token_ids


def test_c3_another_salt_is_another_prefix_and_the_same_one_the_same(scripted):
    llm = scripted("ok")
    prompts = [
        {"prompt": "abcdefghi", **({} if salt is None else {"cache_salt": salt})}
        for salt in ("x", "y", None)
    ]

    assert run(llm, prompts) == [0, 0, 0]
    assert run(llm, prompts) == [8, 8, 8]


def test_c4_a_request_that_waits_is_looked_up_often_and_counted_once(scripted):
    llm = scripted("abcdefg", num_kv_blocks=5)
    stats = []
    llm.tap.on(EngineCoreOutputs, lambda o: stats.append(o.scheduler_stats.prefix_cache_stats))
    with record(llm) as recording:
        # The first grows to all four blocks, so the second waits until it is over.
        llm.generate(["abcdefghi", "abcdefghixyz012"], ONE.replace(max_tokens=7), use_tqdm=False)
    view = recording.at()

    # vLLM's figure, kept as it is: one look-up for each attempt to admit.
    assert sum(each.requests for each in stats) == 1 + 7 + 1
    # Ours: each request once, and what is computed again by itself.
    assert view.totals.prompt_tokens == 9 + 15
    assert view.totals.cached_tokens == view.requests["1"].num_cached_tokens == 8
    assert view.totals.recomputed_tokens == 0


def test_c4_what_is_computed_again_is_a_figure_of_its_own(scripted, endless):
    llm = scripted(endless, num_kv_blocks=6, enable_prefix_caching=False)
    with record(llm) as recording:
        llm.generate(["a" * 7, "b" * 7], SamplingParams(max_tokens=8), use_tqdm=False)
    totals = recording.at().totals

    assert totals.preemptions > 0
    assert totals.recomputed_tokens > 0
    assert (totals.prompt_tokens, totals.cached_tokens) == (14, 0)


def test_c5_a_reset_that_cannot_be_says_so_with_the_blocks_in_use(scripted, endless, caplog):
    llm = scripted(endless, num_kv_blocks=1 << 15)
    assert run(llm, "abcdefghi") == [0]
    stream = llm.submit("z", SamplingParams(max_tokens=None))  # for a long time
    next(iter(stream))

    with caplog.at_level(logging.WARNING):
        assert not llm.reset_prefix_cache()

    (warning,) = caplog.records
    assert re.search(r"since \d+ of 32767 blocks are in use", warning.getMessage())
    assert run(llm, "abcdefghi") == [8]
    stream.abort()
    stream.wait(200)
    assert llm.reset_prefix_cache()
    assert run(llm, "abcdefghi") == [0]


def test_c5_running_requests_can_be_preempted_for_it(scripted, endless):
    llm = scripted(endless, num_kv_blocks=64)
    assert run(llm, "abcdefghi") == [0]
    llm.gate.pause()
    stream = llm.submit("z", SamplingParams(max_tokens=200))
    llm.gate.step(SchedulerOutput)
    llm.gate.resume()

    assert llm.reset_prefix_cache(reset_running_requests=True)

    assert run(llm, "abcdefghi") == [0]
    assert stream.wait(200).token_ids == tuple(endless("1", n) for n in range(200))


def test_c5_a_reset_behind_ones_own_closed_gate_raises(scripted):
    llm = scripted("ok")
    llm.gate.pause()
    llm.submit("abc")
    llm.gate.step(SchedulerOutput)

    with pytest.raises(GateClosedError, match="SchedulerOutput"):
        llm.reset_prefix_cache()

    llm.gate.resume()


def test_c6_a_name_is_the_whole_digest_and_not_the_short_one_that_is_shown():
    pool = BlockPool(num_blocks=4, block_size=2)
    hashes: list[bytes] = []
    BlockHasher(2).extend(hashes, [1, 2], None)
    (name,) = hashes
    twin = bytes(24) + name[-8:]
    (block,) = pool.get_new_blocks(1, "a")
    pool.store([block], [name], [1, 2], 0, 1, "a")

    assert len(name) == 32
    assert short_hash(twin) == short_hash(name)
    assert pool.find(name) == block
    assert pool.find(twin) is None


@pytest.mark.parametrize("block_size", [16, 32])
def test_c7_equal_prompts_that_come_together_share_in_the_same_step(scripted, block_size):
    llm = scripted("ok", block_size=block_size)
    steps = []
    llm.tap.on(SchedulerOutput, steps.append)
    shared = [97 + n % 26 for n in range(33)]

    outputs = llm.generate([[*shared, 1], [*shared, 2]], use_tqdm=False)

    assert [o.num_cached_tokens for o in outputs] == [0, 32]
    assert len(steps[0].scheduled_new_reqs) == 2
    assert [o.outputs[0].text for o in outputs] == ["ok", "ok"]


CODE = """
from lmscope import LLM, record
with LLM("s", execute="scripted", script=lambda i, n: None, block_size=4) as llm:
    with record(llm) as recording:
        llm.generate("abcdefghijkl", use_tqdm=False)
print([b.block_hash for b in sorted(recording.at().blocks.not_empty(), key=lambda b: b.index)])
"""


def test_c8_names_of_blocks_are_the_same_in_every_run():
    printed = {
        subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().count(",") == 2  # three blocks


def test_a_view_shows_what_was_hit_and_who_stored_it(scripted):
    llm = scripted("ok")
    snapshot, subscription = llm.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    llm.generate("abcdefghi", ONE, use_tqdm=False)
    hits = []
    with llm.tap.on(SchedulerOutput, lambda output: hits.extend(view.hits)):
        llm.generate("abcdefghi", ONE, use_tqdm=False)
    subscription.close()

    assert [(hit.request_id, hit.stored_by, hit.stored_step) for hit in hits] == [
        ("1", "0", 1),
        ("1", "0", 1),
    ]
