"""UniProcExecutor: one worker, reached by method name, by function, or directly."""

from __future__ import annotations

import gc
import weakref

import pytest

from lmscope import EngineClosedError
from lmscope.boundary import SchedulerOutput
from lmscope.config import EngineOptions, ModelFacts, resolve
from lmscope.execute.executor import Executor, UniProcExecutor
from lmscope.execute.worker import Worker


def make_executor(loaded) -> UniProcExecutor:
    options = EngineOptions.parse(
        loaded.path, {"block_size": 4, "num_kv_blocks": 9, "max_num_seqs": 2}
    )
    facts = ModelFacts(max_model_len=loaded.max_model_len, kv_block_bytes=1)
    return UniProcExecutor(resolve(options, facts, free_bytes=1 << 30), loaded)


@pytest.fixture
def loaded(tiny_model):
    return tiny_model()[0]


def runner_of(executor):
    (runner,) = executor.collective_rpc(lambda worker: worker._runner)
    return runner


def test_runs_a_step_in_two_halves(loaded, driver):
    executor: Executor = make_executor(loaded)
    plan = driver(loaded)
    plan.add("a", [5, 9, 33])
    scheduler_output = plan.schedule({"a": 3})

    assert executor.execute_model(scheduler_output) is None
    output = executor.sample_tokens()

    assert output.req_ids == ("a",)
    assert len(output.sampled_token_ids[0]) == 1
    assert output.sampled_token_ids == plan.run(scheduler_output).sampled_token_ids


def test_a_step_without_tokens_has_its_answer_at_once(loaded):
    output = make_executor(loaded).execute_model(SchedulerOutput(step=3))

    assert output is not None
    assert (output.step, output.req_ids) == (3, ())


def test_allocates_the_cache_that_the_config_asks_for(loaded):
    cache = runner_of(make_executor(loaded)).kv_cache

    assert len(cache.key) == len(cache.value) == 2
    assert {tuple(tensor.shape) for tensor in (*cache.key, *cache.value)} == {(9, 4, 2, 16)}


def test_the_bytes_of_a_block_are_those_of_its_tensors(loaded):
    executor = make_executor(loaded)
    cache = runner_of(executor).kv_cache

    allocated = sum(tensor.nbytes for tensor in (*cache.key, *cache.value))

    assert executor.kv_block_bytes(4) * 9 == allocated
    assert loaded.kv_formula(4) == "2 (K and V) x 2 layers x 4 tokens x 2 KV heads x 16 x 4 bytes"


def test_collective_rpc_takes_a_name_or_a_function(loaded):
    executor = make_executor(loaded)

    assert executor.collective_rpc("kv_block_bytes", args=(4,)) == [2048]
    assert executor.collective_rpc("kv_block_bytes", kwargs={"block_size": 8}) == [4096]
    assert executor.collective_rpc(lambda worker, x: (type(worker), x), args=(1,)) == [(Worker, 1)]


def test_a_new_cache_begins_empty(loaded):
    executor = make_executor(loaded)
    runner_of(executor).kv_cache.key[0].add_(1)

    executor.initialize_kv_cache(5, 2)

    assert runner_of(executor).kv_cache.key[0].shape[:2] == (5, 2)
    assert runner_of(executor).kv_cache.key[0].count_nonzero() == 0


def test_shutdown_frees_the_cache_and_leaves_the_model_to_others(loaded):
    executor = make_executor(loaded)
    cache = weakref.ref(runner_of(executor).kv_cache)
    other = make_executor(loaded)

    executor.shutdown()
    executor.shutdown()
    gc.collect()

    assert cache() is None
    with pytest.raises(EngineClosedError):
        executor.execute_model(SchedulerOutput(step=1))
    assert other.kv_block_bytes(4) == 2048
