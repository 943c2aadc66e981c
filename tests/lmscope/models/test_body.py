"""The two ways through a model: the same numbers, and when which of them runs."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from lmscope_kernels.numba_support import why_not_numba
from transformers import AutoModelForCausalLM

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.attention_mass import AttentionMass
from lmscope.models.loader import load_model
from lmscope.models.plan import PlanLine

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LEAN = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head size 96": ("Llama", {"head_dim": 96}),
    "llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama, rope llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, rope yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "head_dim": None}),
    "qwen2, windows": (
        "Qwen2",
        {"num_attention_heads": 6, "head_dim": None, "sliding_window": 6,
         "use_sliding_window": True, **MIXED},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3, windows": ("Qwen3", {"sliding_window": 6, "use_sliding_window": True, **MIXED}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0,
         "logits_scaling": 5.0},
    ),
    "olmo2": ("Olmo2", {}),
}  # fmt: skip
BY_MODULE = {
    "gpt2": (
        "GPT2",
        {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "gemma2": ("Gemma2", TINY | MIXED | {"query_pre_attn_scalar": 16, "sliding_window": 6}),
    "phi3": ("Phi3", TINY | {"head_dim": None, "num_attention_heads": 6, "pad_token_id": 0}),
    "qwen3_moe": (
        "Qwen3Moe",
        TINY | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama, rope dynamic": (
        "Llama",
        TINY | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`load("Llama", settings)` saves a model of random weights and loads it, once."""
    made = {}

    def load_one(kind, settings):
        key = kind, repr(settings)
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(
                **{name: value for name, value in settings.items() if value is not None}
            )
            module = AutoModelForCausalLM.from_config(config)
            # Biases and norms begin as zeros and ones, which would hide that one is left out.
            for name, parameter in module.named_parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
            module.save_pretrained(folder)
            made[key] = load_model(folder, show_progress=False)
        return made[key]

    return load_one


@pytest.fixture
def fresh_llama(tmp_path):
    """A Llama that a test may change."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    return load_model(tmp_path, show_progress=False)


def step(loaded, forward, query_lens=(1, 5, 1, 12), seq_lens=(9, 5, 1, 20)):
    """Logits and cache of a mixed batch: decoding, a prompt, one token, the end of a prompt."""
    max_blocks = -(-max(seq_lens) // 4)
    ids = 1 + np.random.default_rng(0).permutation(len(seq_lens) * max_blocks)
    table = ids.astype(np.int32).reshape(len(seq_lens), max_blocks)
    rows = [
        (row, position)
        for row, (num, end) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(end - num, end)
    ]
    positions = np.array([position for _, position in rows], dtype=np.int64)
    batch = BatchView.build(
        positions=positions,
        slot_mapping=np.array([table[r, p // 4] * 4 + p % 4 for r, p in rows], dtype=np.int64),
        query_start_loc=np.cumsum([0, *query_lens]).astype(np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=table,
        block_size=4,
        device=CPU,
        windows=loaded.windows,
        is_softcapped=loaded.is_softcapped,
    )
    shape = loaded.num_kv_heads, loaded.head_size, torch.float32, CPU
    cache = KVCache.allocate(loaded.num_layers, len(ids) + 1, 4, *shape)
    generator = torch.Generator().manual_seed(1)
    for each in (*cache.key, *cache.value):
        each.normal_(generator=generator)
    token_ids = torch.arange(len(rows)) * 5 % loaded.vocab_size
    # Not in order, and the last row twice.
    indices = np.array([len(rows) - 1, 0, 3, len(rows) - 1])
    return forward(token_ids, batch, cache, indices), cache


def by_module(body):
    return lambda ids, batch, cache, rows: body._run_module(
        ids, batch, cache, torch.from_numpy(rows)
    )


def assert_same(one, other):
    for got, wanted in zip(
        (one[0], *one[1].key, *one[1].value),
        (other[0], *other[1].key, *other[1].value),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("between", ["numba", "torch"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "default"])
@pytest.mark.parametrize("name", LEAN)
@torch.inference_mode()
def test_the_lean_forward_is_the_module(load, name, exact, between, monkeypatch):
    kind, changes = LEAN[name]
    loaded = load(kind, TINY | changes)
    body = loaded.body(exact=exact)
    assert body._lean is not None, body.plan(PlanLine("1"))
    if between == "torch":
        monkeypatch.setattr(body._lean, "_compiled", None)
    elif why_not_numba() is not None:
        pytest.skip("needs the extra cpu")
    else:
        assert body._lean._compiled is not None
    assert ("numba compiled" in body.plan(PlanLine("1")).body.why) == (between == "numba")

    assert_same(step(loaded, body), step(loaded, by_module(body)))
    # Each request one row, which is what most steps are.
    decoding = {"query_lens": (1, 1, 1, 1), "seq_lens": (9, 5, 1, 20)}
    assert_same(step(loaded, body, **decoding), step(loaded, by_module(body), **decoding))


@torch.inference_mode()
def test_compiled_loops_give_the_same_bits_to_who_measures_attention(load):
    loaded = load("Qwen3", TINY | {"sliding_window": 6, "use_sliding_window": True, **MIXED})
    body = loaded.body(exact=True)

    def watched(ids, batch, cache, rows):
        mass = AttentionMass(
            query_start_loc=batch.query_start_loc.numpy(),
            seq_lens=batch.seq_lens.numpy(),
            block_table=batch.block_table.numpy(),
            block_size=4,
            device=CPU,
        )
        return body(ids, replace(batch, mass=mass), cache, rows)

    assert torch.equal(step(loaded, watched)[0], step(loaded, body)[0])


@pytest.mark.parametrize("name", BY_MODULE)
@torch.inference_mode()
def test_other_architectures_run_through_their_module_with_packed_weights(load, name):
    kind, settings = BY_MODULE[name]
    loaded = load(kind, settings)
    body, exact = loaded.body(exact=False), loaded.body(exact=True)
    assert body._lean is None

    logits, _ = step(loaded, body)
    wanted, _ = step(loaded, exact)

    assert str(body.plan(PlanLine("1")).body).startswith(
        "module of transformers: no lean forward: "
    )
    if body.plan(PlanLine("1")).linears.what == "fp16-packed":
        difference = float((logits - wanted).norm() / wanted.norm())
        assert 1e-6 < difference < 5e-3


@torch.inference_mode()
def test_positions_beyond_the_first_rotary_table_are_the_module_s(load):
    loaded = load("Llama", TINY)
    body = loaded.body(exact=True)
    long = {"query_lens": (1, 3), "seq_lens": (2500, 700)}

    assert_same(step(loaded, body, **long), step(loaded, by_module(body), **long))


@pytest.mark.parametrize("place", ["", "model.layers.1.mlp", "model.norm", "lm_head"])
@torch.inference_mode()
def test_a_hook_makes_steps_run_through_the_module_and_hears_them(fresh_llama, place):
    body = fresh_llama.body(exact=False)
    before, _ = step(fresh_llama, body)
    heard = []

    handle = fresh_llama.module.get_submodule(place).register_forward_hook(
        lambda module, given, output: heard.append(module)
    )
    during, _ = step(fresh_llama, body)
    plan = body.plan(PlanLine("1"))
    handle.remove()
    after, _ = step(fresh_llama, body)

    assert heard == [fresh_llama.module.get_submodule(place)]
    assert "hooks" in plan.body.why
    assert body.plan(PlanLine("1")).body.what == "lean forward"
    # With the same packed weights, so that listening changes no tokens.
    torch.testing.assert_close(during, before, atol=1e-4, rtol=0)
    assert torch.equal(after, before)


def edit_in_place(module):
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(2.0)


def edit_by_parameter(module):
    weight = module.model.layers[1].self_attn.o_proj.weight
    module.model.layers[1].self_attn.o_proj.weight = torch.nn.Parameter(weight * 2, False)


def edit_by_layer(module):
    module.model.layers[1].mlp = torch.nn.Identity()


def edit_in_place_through_data(module):
    module.model.layers[1].mlp.down_proj.weight.data.mul_(2.0)


def edit_by_data(module):
    weight = module.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data * 2


def edit_by_setting(module):
    module.model.layers[1].self_attn.scaling = 2.0
    module.model.norm.variance_epsilon = 0.5


def edit_by_buffer(module):
    module.model.rotary_emb.inv_freq.mul_(0.5)


EDITS = [
    edit_in_place,
    edit_by_parameter,
    edit_by_layer,
    edit_in_place_through_data,
    edit_by_data,
    edit_by_setting,
    edit_by_buffer,
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_of_the_module_takes_effect_and_is_said_once(fresh_llama, edit, caplog):
    body = fresh_llama.body(exact=False)
    before, _ = step(fresh_llama, body)

    edit(fresh_llama.module)
    with caplog.at_level(logging.WARNING):
        after, _ = step(fresh_llama, body)
        step(fresh_llama, body)

    wanted, _ = step(fresh_llama, by_module(fresh_llama.body(exact=True)))
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, wanted.clone())
    warnings = [r.getMessage() for r in caplog.records if "changed after" in r.getMessage()]
    assert 1 <= len(warnings) <= 2  # one of each body
    plan = body.plan(PlanLine("1"))
    assert "changed" in plan.body.why
    assert plan.linears.what == "F.linear"


@torch.inference_mode()
def test_a_weight_that_was_written_through_data_stays_noticed(fresh_llama):
    body = fresh_llama.body(exact=False)
    edit_by_data(fresh_llama.module)
    step(fresh_llama, body)

    # Only prompts look so closely, and tokens after them are of the same model.
    after, _ = step(fresh_llama, body, [1, 1, 1, 1])

    wanted, _ = step(fresh_llama, by_module(fresh_llama.body(exact=True)), [1, 1, 1, 1])
    torch.testing.assert_close(after, wanted.clone())


@torch.inference_mode()
def test_another_forward_of_a_class_is_heard(fresh_llama, monkeypatch):
    body = fresh_llama.body(exact=False)
    before, _ = step(fresh_llama, body)
    norm = type(fresh_llama.module.model.norm)
    monkeypatch.setattr(norm, "forward", lambda self, rows: 2 * rows)

    during, _ = step(fresh_llama, body)
    plan = body.plan(PlanLine("1"))
    monkeypatch.undo()
    after, _ = step(fresh_llama, body)

    assert plan.body.what == "module of transformers"
    assert not torch.allclose(during, before, atol=1e-2)
    assert torch.equal(after, before)


def test_a_module_in_another_dtype_says_what_to_do(fresh_llama):
    body = fresh_llama.body(exact=False)
    fresh_llama.module.to(torch.bfloat16)

    with pytest.raises(ValueError, match=r"into bfloat16 .*are float32; .*dtype='bfloat16'"):
        step(fresh_llama, body)


def test_a_module_that_is_not_as_transformers_made_it_is_not_lean(fresh_llama):
    class Louder(torch.nn.Linear):
        def forward(self, rows):
            return super().forward(rows) * 2

    fresh_llama.module.model.layers[0].self_attn.v_proj.__class__ = Louder

    plan = fresh_llama.body(exact=True).plan(PlanLine("1"))

    assert "v_proj" in plan.body.why
    assert "Louder" in plan.body.why


def test_a_lean_forward_with_other_numbers_is_not_used(fresh_llama):
    # No list of names could know of this one; that both are run and compared does.
    def double(self, rows):
        return rows * 2

    norm = type(fresh_llama.module.model.norm)
    original = norm.forward
    norm.forward = double
    try:
        plan = fresh_llama.body(exact=True).plan(PlanLine("1"))
    finally:
        norm.forward = original

    assert plan.body.what == "module of transformers"
    assert "differed" in plan.body.why


def test_weights_stay_readable_and_bodies_are_shared(fresh_llama):
    weight = fresh_llama.module.model.layers[0].mlp.up_proj.weight
    before = weight.clone()

    body = fresh_llama.body(exact=False)

    assert fresh_llama.body(exact=False) is body
    assert fresh_llama.body(exact=True) is not body
    assert fresh_llama.module.model.layers[0].mlp.up_proj.weight is weight
    assert torch.equal(weight, before)
    assert repr(fresh_llama.module.lm_head).startswith("Linear(")


def test_a_weight_that_half_precision_cannot_hold_stays_as_it_is(tmp_path):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    with torch.no_grad():
        module.lm_head.weight[0, 0] = 1e5
    module.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, show_progress=False)

    plan = loaded.body(exact=False).plan(PlanLine("2", "as asked"))

    if "fp16-packed" in plan.linears.what:
        assert plan.linears.what == "fp16-packed in 21 of 22 layers, F.linear in the others"
        assert "lm_head: a weight of 100000" in plan.linears.why
        assert plan.head.what == "F.linear"


def test_a_model_that_is_loaded_in_inference_mode_can_be_watched_for_changes(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    with torch.inference_mode():
        body = load_model(tmp_path, show_progress=False).body(exact=True)

    edit_in_place(body.module)

    assert "changed" in body.plan(PlanLine("1")).body.why


def test_a_plan_is_a_line_for_each_choice(load):
    plan = (
        load("Llama", TINY | {"tie_word_embeddings": True})
        .body(exact=True)
        .plan(PlanLine("2", "as asked"))
    )

    lines = str(plan).split("\n")
    names = ["body", "linears", "head", "attention", "threads", "dtype", "memory"]
    assert [line.split()[0] for line in lines] == [*names, "device", "scheduling"]
    assert lines[1] == "linears    F.linear: exact=True"
    assert lines[2] == "head       F.linear, tied to the embedding"
    assert lines[4] == "threads    2: as asked"
    assert "no copy" in lines[6]


@pytest.mark.skipif(why_not_numba() is not None, reason="needs the extra cpu")
def test_a_plan_says_when_compiled_loops_have_one_thread(fresh_llama, monkeypatch):
    body = fresh_llama.body(exact=True)
    before = body.plan(PlanLine("2")).attention.why
    monkeypatch.setattr("lmscope.models.body.has_safe_threads", lambda: False)

    assert body.plan(PlanLine("2")).attention.why.startswith(before)
    assert "loops run on one thread" in body.plan(PlanLine("2")).attention.why
