"""quantization="int8": when it can be had, and that a step in one call a layer is the same step."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from lmscope_kernels import int8_linear_cpu
from lmscope_kernels.half_linear_cpu import why_no_half_loops
from lmscope_kernels.int8_linear_cpu import Int8Linear
from lmscope_kernels.numba_support import has_safe_threads
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from lmscope.models import linear
from lmscope.models.attention import BatchView, KVCache
from lmscope.models.int8_step import Int8Step
from lmscope.models.linear import (
    Fp16PackedLinears,
    Int8Linears,
    WeightAndBias,
    choose_linear_method,
)
from lmscope.models.loader import load_model

CPU = torch.device("cpu")
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)
needs_half_loops = pytest.mark.skipif(
    why_no_half_loops() is not None, reason="needs numba, and x86 with AVX2, FMA and F16C"
)
TINY = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@pytest.fixture
def load(tmp_path):
    """`load(config)` saves a model of random weights and loads it."""

    def load_one(config):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return load_model(tmp_path, show_progress=False)

    return load_one


def choose(quantization, dtype=torch.float32, device=CPU):
    return choose_linear_method(exact=False, quantization=quantization, dtype=dtype, device=device)


def decode_batch(loaded, seq_lens):
    """Requests with one row each in blocks of 4, and a cache of random numbers."""
    torch.manual_seed(1)
    max_blocks = -(-max(seq_lens) // 4)
    ids = 1 + np.random.default_rng(0).permutation(len(seq_lens) * max_blocks)
    table = ids.astype(np.int32).reshape(len(seq_lens), max_blocks)
    positions = np.array(seq_lens, dtype=np.int64) - 1
    slots = table[np.arange(len(seq_lens)), positions // 4].astype(np.int64) * 4 + positions % 4
    batch = BatchView.build(
        positions=positions,
        slot_mapping=slots,
        query_start_loc=np.arange(len(seq_lens) + 1, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=table,
        block_size=4,
        device=CPU,
        windows=loaded.windows,
    )
    shape = loaded.num_kv_heads, loaded.head_size, torch.float32, CPU
    cache = KVCache.allocate(loaded.num_layers, len(ids) + 1, 4, *shape)
    for each in (*cache.key, *cache.value):
        each.normal_()
    return batch, cache


def test_an_unknown_quantization_names_the_known_one():
    with pytest.raises(ValueError, match=r"'int-8'.*int8"):
        choose("int-8")


@needs_numba
def test_int8_is_chosen_by_name_and_called_approximate():
    chosen = choose("int8")

    assert chosen.method.name == "int8"
    assert "approximate" in chosen.why


@needs_numba
def test_the_plan_says_what_more_rows_are_multiplied_in(monkeypatch):
    for file in (linear, int8_linear_cpu):
        monkeypatch.setattr(file, "why_no_half_loops", lambda: "this processor has no AVX2")

    chosen = choose("int8")

    assert "float32, since this processor has no AVX2, for more than 4 rows" in chosen.why
    assert "steps of more than 4 rows turn all weights back into float32" in chosen.warning
    assert chosen.method.packed_bytes(torch.zeros(10, 32)) == 320 + 40


@needs_half_loops
def test_more_rows_are_multiplied_in_half_precision_where_there_are_loops():
    chosen = choose("int8")

    assert "half precision for more than 4 rows" in chosen.why
    assert chosen.warning == ""
    halves = Fp16PackedLinears().packed_bytes(torch.zeros(10, 32))
    assert chosen.method.packed_bytes(torch.zeros(10, 32)) == 320 + 40 + halves


@pytest.mark.parametrize(
    ("dtype", "device", "advice"),
    [
        (torch.bfloat16, CPU, "dtype='float32'"),
        (torch.float32, torch.device("cuda"), "device='cpu'"),
    ],
)
def test_int8_where_it_cannot_run_says_what_to_do(dtype, device, advice):
    with pytest.raises(ValueError, match=advice):
        choose("int8", dtype, device)


def test_int8_without_numba_says_what_to_install(monkeypatch):
    monkeypatch.setattr(linear, "why_not_numba", lambda: "numba is not installed; pip install x")

    with pytest.raises(ValueError, match=r"extra cpu.*pip install"):
        choose("int8")


@needs_numba
def test_parts_are_quantised_side_by_side_and_a_weight_that_is_no_number_is_refused():
    method, weight, bias = Int8Linears(), torch.randn(3, 8), torch.randn(2)

    packed = method.pack([WeightAndBias(weight, None), WeightAndBias(weight[:2], bias)])

    assert isinstance(packed, Int8Linear)
    assert packed.weight.weight.shape == (5, 8)
    assert packed.bias.tolist() == [0, 0, 0, *bias.tolist()]
    assert method.refusal(weight) is None
    weight[0, 0] = torch.nan
    assert "not a finite number" in method.refusal(weight)


@needs_numba
@pytest.mark.skipif(not has_safe_threads(), reason="numba has no safe threads here")
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        Qwen2Config(**{**TINY, "hidden_size": 96}),
        MistralConfig(**TINY, sliding_window=6),
    ],
    ids=["llama", "qwen2", "mistral"],
)
def test_a_step_in_one_call_a_layer_is_the_same_step(load, monkeypatch, config, num_requests):
    loaded = load(config)
    body = loaded.body(exact=False, quantization="int8")
    seq_lens = [9, 3, 1, 17][:num_requests]
    token_ids, indices = torch.arange(num_requests) + 5, np.arange(num_requests)
    calls = []
    original = Int8Step.__call__

    def counted(self, *arguments):
        calls.append(len(arguments[0]))
        original(self, *arguments)

    monkeypatch.setattr(Int8Step, "__call__", counted)
    batch, cache = decode_batch(loaded, seq_lens)
    in_one_call = body(token_ids, batch, cache, indices)
    assert calls == [num_requests]
    monkeypatch.setattr(Int8Step, "takes", lambda *_: False)
    batch, usual_cache = decode_batch(loaded, seq_lens)
    usual = body(token_ids, batch, usual_cache, indices)

    assert calls == [num_requests]
    assert (in_one_call - usual).norm() / usual.norm() < 2e-3
    for got, wanted in zip(
        cache.key + cache.value, usual_cache.key + usual_cache.value, strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-2)


@needs_numba
@pytest.mark.parametrize("num_requests", [1, 5])
def test_int8_is_near_float32(load, num_requests):
    loaded = load(LlamaConfig(**TINY))
    seq_lens = [9, 3, 1, 17, 8][:num_requests]
    token_ids, indices = torch.arange(num_requests) + 5, np.arange(num_requests)

    got = loaded.body(exact=False, quantization="int8")(
        token_ids, *decode_batch(loaded, seq_lens), indices
    )
    wanted = loaded.body(exact=True)(token_ids, *decode_batch(loaded, seq_lens), indices)

    assert 1e-5 < (got - wanted).norm() / wanted.norm() < 0.05


@needs_numba
def test_a_family_that_the_step_does_not_know_runs_layer_by_layer(load):
    loaded = load(Qwen3Config(**TINY))

    body = loaded.body(exact=False, quantization="int8")

    assert body._lean is not None
    assert not body._lean.runs_layers_in_one_call
