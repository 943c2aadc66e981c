"""What is left of a GPU for the KV cache: the arithmetic, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmscope.config import EngineOptions, ModelFacts, resolve
from lmscope.execute import gpu_memory
from lmscope.execute.gpu_memory import room_for_cache

GB = 10**9
BLOCK_BYTES = 2 * 28 * 16 * 8 * 128 * 2


def test_the_room_is_what_the_utilization_leaves():
    room = room_for_cache(total=140 * GB, free=137 * GB, own=2 * GB, step=GB, utilization=0.9)

    assert room.num_bytes == 126 * GB - 1 * GB - 2 * GB - GB - (768 << 20)
    for number in ("0.9", "140.00 GB", "holds 2.00", "driver 1.00"):
        assert number in room.why


def test_another_process_on_the_memory_is_named_with_its_size():
    with pytest.raises(ValueError, match=r"other processes and the driver 120\.00.*end the other"):
        room_for_cache(total=140 * GB, free=10 * GB, own=10 * GB, step=GB, utilization=0.9)


def test_a_model_that_fills_the_memory_is_told_so():
    with pytest.raises(ValueError, match=r"holds 22\.00.*close other engines.*smaller model"):
        room_for_cache(total=24 * GB, free=GB, own=22 * GB, step=GB, utilization=0.9)


@pytest.mark.parametrize(
    ("free", "own", "advice"),
    [(1, 10, "end the other process, or lower max_num_batched_tokens"), (1, 20, "free; lower max")],
)
def test_a_step_that_runs_out_of_memory_is_an_error_with_who_holds_it(
    monkeypatch, free, own, advice
):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    monkeypatch.setattr(gpu_memory, "_largest_step_bytes", refuse)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GB, 24 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: own * GB)
    loaded = SimpleNamespace(device=torch.device("cuda"))

    with pytest.raises(ValueError, match=r"largest step does not fit.*1\.00 GB are free") as caught:
        gpu_memory.gpu_room(EngineOptions.parse("m", {}), loaded, "triton")

    assert advice in str(caught.value)
    assert gpu_memory.gpu_room(EngineOptions.parse("m", {"num_kv_blocks": 9}), loaded, "t") is None


def facts(kv_cache_bytes: int | None) -> ModelFacts:
    return ModelFacts(
        max_model_len=40960,
        kv_block_bytes=BLOCK_BYTES,
        kv_formula="so many bytes",
        device="cuda",
        dtype="bfloat16",
        attention_backend="triton",
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_why="gpu_memory_utilization is 0.9: there is little",
    )


def test_the_pool_is_all_of_the_room():
    config = resolve(EngineOptions.parse("m", {}), facts(100 * GB), free_bytes=1)

    assert config.num_kv_blocks == 100 * GB // BLOCK_BYTES
    assert config.max_model_len == 40960
    assert config.max_num_seqs == 256
    assert config.attention_backend == "triton"


def test_explicit_blocks_win():
    config = resolve(EngineOptions.parse("m", {"num_kv_blocks": 9}), facts(None), free_bytes=1)

    assert config.num_kv_blocks == 9


def test_room_for_less_than_a_request_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match=r"0\.9: there is little.*so many bytes"):
        resolve(EngineOptions.parse("m", {}), facts(BLOCK_BYTES), free_bytes=100 * GB)


@pytest.mark.parametrize("part", [0, -0.5, 1.1])
def test_a_utilization_is_a_part(part):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        EngineOptions.parse("m", {"gpu_memory_utilization": part})
    with pytest.raises(TypeError, match="number"):
        EngineOptions.parse("m", {"gpu_memory_utilization": "0.9"})


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_back_ends_that_are_not_here_say_what_to_use(name):
    with pytest.raises(ValueError, match=f"{name}.*use 'triton'"):
        EngineOptions.parse("m", {"attention_backend": name})


def test_a_back_end_that_nobody_knows_names_the_nearest():
    with pytest.raises(ValueError, match=r"tritn.*triton"):
        EngineOptions.parse("m", {"attention_backend": "tritn"})


@pytest.mark.parametrize("given", ["1", "0", None])
def test_batches_are_checked_when_the_environment_says_so(monkeypatch, given):
    if given is None:
        monkeypatch.delenv("LMSCOPE_CHECK", raising=False)
    else:
        monkeypatch.setenv("LMSCOPE_CHECK", given)
    config = resolve(EngineOptions.parse("m", {}), facts(GB), free_bytes=1)

    assert config.check_batches is (given == "1")


def test_what_only_a_gpu_has_is_said_to_have_no_effect_on_a_cpu(caplog):
    caplog.set_level("INFO")
    cpu = ModelFacts(max_model_len=64, kv_block_bytes=1000)
    options = {"gpu_memory_utilization": 0.5, "enforce_eager": True}
    resolve(EngineOptions.parse("m", options), cpu, free_bytes=1 << 30)

    said = [record.getMessage() for record in caplog.records]
    assert "gpu_memory_utilization=0.5 has no effect on a CPU" in said
    assert "enforce_eager=True has no effect on a CPU" in said
