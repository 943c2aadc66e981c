"""The batch-invariant forward: what it runs on and refuses, and that its parts notice nobody."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lmscope import LLM, SamplingParams
from lmscope.models import batch_invariant
from lmscope.models.attention import BatchView, KVCache
from lmscope.models.batch_invariant import InvariantLinears
from lmscope.models.fuse import RotaryTable
from lmscope.models.linear import (
    PlainLinears,
    WeightAndBias,
    choose_linear_method,
)
from lmscope.models.loader import load_model

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 97,
    "hidden_size": 54,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {"hidden_size": 60, "num_attention_heads": 6, "head_dim": None},
    "Qwen3": {"tie_word_embeddings": True},
    "SmolLM3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "Granite": {
        "attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
        "logits_scaling": 5.0,
    },
    "Olmo2": {},
}  # fmt: skip


def save(folder, kind, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{name: value for name, value in (TINY | settings).items() if value is not None}
    )
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    module.save_pretrained(folder)


@pytest.fixture
def load(tmp_path):
    def load_one(kind, **settings):
        save(tmp_path, kind, **settings)
        return load_model(tmp_path, show_progress=False)

    return load_one


class Caller:
    """Runs parts of requests through a body, each request in two blocks of eight tokens."""

    def __init__(self, loaded, body, num_requests):
        self.loaded, self.body = loaded, body
        self.table = np.arange(1, 2 * num_requests + 1, dtype=np.int32).reshape(-1, 2)
        self.cache = KVCache.allocate(
            loaded.num_layers, 2 * num_requests + 1, 8, loaded.num_kv_heads, loaded.head_size,
            loaded.dtype, CPU,
        )  # fmt: skip

    def __call__(self, parts):
        """parts: (request, first position, token ids). Logits of all rows, one part each."""
        lens = [len(tokens) for *_, tokens in parts]
        positions = np.concatenate(
            [np.arange(first, first + len(tokens)) for _, first, tokens in parts]
        )
        table = self.table[[request for request, *_ in parts]]
        row_of = np.repeat(np.arange(len(parts)), lens)
        batch = BatchView.build(
            positions=positions,
            slot_mapping=table[row_of, positions // 8].astype(np.int64) * 8 + positions % 8,
            query_start_loc=np.array([0, *np.cumsum(lens)], dtype=np.int32),
            seq_lens=np.array([first + len(tokens) for _, first, tokens in parts], np.int32),
            block_table=table,
            block_size=8,
            device=CPU,
            windows=self.loaded.windows,
        )
        token_ids = torch.tensor([token for *_, tokens in parts for token in tokens])
        logits = self.body(token_ids, batch, self.cache, np.arange(len(token_ids)))
        return torch.split(logits, lens)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kernel", ["numba", "torch"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_chunks_and_company_change_no_bit_of_any_family(load, kind, kernel, exact, monkeypatch):
    if kernel == "torch":
        monkeypatch.setattr(
            "lmscope_kernels.decode_attention_cpu.why_not_numba", lambda: "not here"
        )
    loaded = load(kind, **FAMILIES[kind])
    body = loaded.body(exact=exact, batch_invariant=True)
    tokens = [(7 * place + 3) % 97 for place in range(15)]
    wanted = Caller(loaded, body, 1)([(0, 0, tokens)])[0]
    plain = Caller(loaded, loaded.body(exact=exact), 1)([(0, 0, tokens)])[0]
    assert torch.allclose(wanted, plain, atol=1e-4 * float(plain.abs().max()))

    caller = Caller(loaded, body, 9)
    got = []
    for first, end in ((0, 1), (1, 9), (9, 10), (10, 15)):
        others = [(request, 0, [request] * request) for request in range(1, 9)]
        parts = [*others[: first % 9], (0, first, tokens[first:end]), *others[first % 9 :]]
        got.append(caller(parts)[first % 9 if first % 9 < 8 else 8])
    assert torch.equal(torch.cat(got), wanted)


def test_a_plan_says_what_it_does(load):
    body = load("Llama").body(exact=True, batch_invariant=True)
    plan = body.plan(None)

    assert plan.body.what == "batch-invariant forward"
    assert "the same bits alone and in any batch" in plan.body.why
    assert plan.linears.what == "F.linear, batch-invariant"
    assert "each row by itself" in plan.attention.what


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("Gemma2", {"query_pre_attn_scalar": 16}, "Gemma2ForCausalLM cannot be run so: Gemma2"),
        ("Llama", {"hidden_act": "gelu"}, "LlamaForCausalLM cannot be run so: its activation"),
    ],
)
def test_an_architecture_without_such_a_forward_is_refused(load, kind, settings, reason):
    loaded = load(kind, **settings)

    with pytest.raises(ValueError, match=reason):
        loaded.body(exact=True, batch_invariant=True)


def test_another_dtype_is_refused(tmp_path):
    save(tmp_path, "Llama")

    with pytest.raises(ValueError, match="it is for float32, and this is bfloat16"):
        LLM(tmp_path, dtype="bfloat16", batch_invariant=True)


def test_quantization_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="batch_invariant is True and quantization is 'int8'"):
        LLM("no such model", quantization="int8", batch_invariant=True)


def test_hooks_are_said_to_end_it(tmp_path, caplog):
    save(tmp_path, "Llama")
    with LLM(tmp_path, batch_invariant=True, threads=1, num_kv_blocks=8) as llm:
        handle = llm.module.register_forward_hook(lambda *_: None)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        with caplog.at_level(logging.WARNING, "lmscope"):
            llm.generate({"prompt_token_ids": [1, 2]}, params, use_tqdm=False)
        handle.remove()

    said = [r.getMessage() for r in caplog.records if "not batch-invariant" in r.getMessage()]
    assert len(said) == 1


def method():
    return InvariantLinears(
        choose_linear_method(exact=False, quantization=None, dtype=torch.float32, device=CPU).method
    )


@pytest.mark.parametrize("make", [method, lambda: InvariantLinears(PlainLinears())])
@pytest.mark.parametrize("shape", [(101, 90), (33, 1000), (5, 7)])
def test_a_product_is_the_same_for_any_number_of_rows(make, shape):
    weight, rows = torch.randn(shape), torch.randn(250, shape[1])
    bias = torch.randn(len(weight))
    linear = make().pack([WeightAndBias(weight, bias)])
    wanted = linear(rows)

    assert torch.allclose(wanted, F.linear(rows, weight, bias), atol=0.05)
    for num_rows in (0, 1, 2, 5, 11, 12, 13, 47, 49, 191, 193):
        start = 250 - num_rows
        assert torch.equal(linear(rows[start:]), wanted[start:])


def test_unaligned_weights_and_rows_give_the_bits_of_aligned_ones():
    numbers = torch.randn(20 * 30 + 1)
    unaligned = numbers[1:].view(20, 30)
    rows = torch.randn(7 * 30 + 1)[1:].view(7, 30)
    results = {
        InvariantLinears(PlainLinears()).pack([WeightAndBias(weight, None)])(x).numpy().tobytes()
        for weight in (unaligned, unaligned.clone())
        for x in (rows, rows.clone())
    }

    assert unaligned.data_ptr() % 64 != 0
    assert len(results) == 1


def test_a_product_that_notices_places_goes_one_row_at_a_time(caplog):
    """A processor whose product depends on where in a call a row stands."""

    class Noticing(PlainLinears):
        def pack(self, parts):
            linear = super().pack(parts)

            def noticing(rows):
                place = torch.arange(len(rows))[:, None]
                calls.append(len(rows))
                return linear(rows) * (1 + 1e-6 * place)

            return noticing

    calls = []
    linear = InvariantLinears(Noticing()).pack([WeightAndBias(torch.randn(6, 5), None)])
    rows = torch.randn(4, 5)
    linear(rows)
    calls.clear()

    assert torch.equal(linear(rows)[2:], linear(rows[2:]))
    assert calls == [1] * 6
    assert "one row at a time" in caplog.text


def test_weights_that_half_precision_cannot_hold_are_multiplied_in_float32():
    linears = method()
    weight = torch.randn(6, 5) * 1e6
    linear = linears.pack([WeightAndBias(weight, None)])
    rows = torch.randn(3, 5)

    assert torch.allclose(linear(rows), F.linear(rows, weight), rtol=1e-5)


def test_rows_of_the_activation_do_not_notice_where_a_buffer_ends():
    gate_up = torch.randn(60, 2 * 1501)
    whole = batch_invariant._silu_mul(gate_up)

    for start, end in ((0, 1), (7, 9), (20, 60)):
        assert torch.equal(batch_invariant._silu_mul(gate_up[start:end]), whole[start:end])
    gate, up = gate_up.chunk(2, -1)
    assert torch.allclose(whole, F.silu(gate) * up, rtol=1e-5, atol=1e-6)


def test_cosines_of_a_position_do_not_depend_on_how_far_the_table_reaches(load):
    rotary = load("Llama").module.model.rotary_emb
    near, far = (
        RotaryTable(rotary, 16, CPU, positions_per_page=batch_invariant.POSITIONS_PER_PAGE)
        for _ in range(2)
    )
    far.reserve(4096)

    for short, long in zip(near.reserve(3), far.reserve(3), strict=True):
        assert len(short) < len(long) == 4096
        assert torch.equal(short, long[: len(short)])
    cosine, _ = rotary(torch.empty(0), torch.tensor([[1, 500, 4000]]))
    assert torch.allclose(far.reserve(1)[0][[1, 500, 4000], 0], cosine[0], atol=1e-5)
