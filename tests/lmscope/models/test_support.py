"""What runs is proven to run right, and the rest is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from lmscope import LLM
from lmscope.models.attention import ATTENTION_NAME, BatchView, KVCache
from lmscope.models.support import ModelShape, check_supported

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_KV_HEADS = {
    key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "head_dim")
}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
RUNS = {
    "Llama": COMMON,
    "Qwen2": COMMON,
    "Qwen3": COMMON,
    "Qwen2 with windows": {
        **COMMON, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4,
    },
    "Mistral without a window": {**COMMON, "sliding_window": None},
    "Mistral": {**COMMON, "sliding_window": 4},
    "Mixtral": {**COMMON, "num_local_experts": 4, "sliding_window": 4},
    "Gemma2": {**COMMON, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "Gemma3": {**COMMON, "sliding_window": 4, "layer_types": MIXED},
    "Cohere2": {**COMMON, "sliding_window": 4, "layer_types": MIXED},
    "Olmo3": {**COMMON, "sliding_window": 4, "layer_types": MIXED},
    "Phi3": {**NO_KV_HEADS, "sliding_window": 4},
    "Qwen3Moe": {**COMMON, **EXPERTS},
    "Olmo2": COMMON,
    "Granite": {**COMMON, "logits_scaling": 3.0},
    "SmolLM3": {**COMMON, "no_rope_layers": [1, 0]},
    "GPT2": {
        "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3,
        "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
    },
    "GPTNeoX": NO_KV_HEADS,
}  # fmt: skip
# Scaled rotary embeddings; dynamic and longrope are plain up to the length of the model.
for _kind, _more in (
    ("linear", {}),
    ("dynamic", {}),
    (
        "longrope",
        {
            "short_factor": [1.5] * 8,
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ),
    ("yarn", {"original_max_position_embeddings": 4}),
    (
        "llama3",
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
):
    _rope = {"rope_type": _kind, "rope_theta": 1e4, "factor": 4.0, **_more}
    RUNS[f"Llama with {_kind} scaling"] = {**COMMON, "rope_parameters": _rope}
REFUSED = {
    "Bloom": ({"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "does not call"),
    "Mpt": (
        {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
        "fails before it has called the attention",
    ),
    # Its window is in the mask alone.
    "Phimoe": (
        {**COMMON, "num_local_experts": 4, "sliding_window": 16},
        "a window of 16 tokens in its config, and asks for None",
    ),
    "DeepseekV3": (
        {
            **NO_KV_HEADS,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
        "keys of 16 and values of 8",
    ),
    "GptOss": (
        {**COMMON, "num_local_experts": 4, "layer_types": ["full_attention"] * 2},
        "needs s_aux",
    ),
    "Qwen3Next": (COMMON, "linear_attention"),
    "Lfm2": ({**COMMON, "layer_types": ["conv", "full_attention"]}, "conv"),
    "Llama4": ({**COMMON, "num_local_experts": 2}, "chunked_attention"),
    "Mamba": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "linear_attention"),
    "FalconH1": (COMMON, "hybrid|from token to token"),
    "StableLm": ({**NO_KV_HEADS, "num_key_value_heads": 2}, "does not hand keyword arguments on"),
    "Bert": ({**NO_KV_HEADS, "is_decoder": False}, "not causal"),
}
CLASSES = {"Llama4": "Llama4TextConfig", "Gemma3": "Gemma3TextConfig"}


def make_module(name, settings, attention=ATTENTION_NAME):
    torch.manual_seed(0)
    name = name.split()[0]
    config = getattr(transformers, CLASSES.get(name, name + "Config"))(**settings)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return module.eval()


def paged_logits(module, shape, tokens, cuts):
    """Logits of all tokens, computed in pieces over a shuffled cache beside another request."""
    cache = KVCache.allocate(
        shape.num_layers, 20, 4, shape.num_kv_heads, shape.head_size, torch.float32,
        torch.device("cpu"),
    )  # fmt: skip
    table = np.array([[5, 2, 9, 7], [3, 8, 1, 4]], dtype=np.int32)
    rows = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        # The other request runs in the same batch, in front, with tokens of its own.
        positions = np.array([0, *range(start, end)])
        request = np.array([1] + [0] * (end - start))
        slots = table[request, positions // 4].astype(np.int64) * 4 + positions % 4
        batch = BatchView.build(
            positions=positions,
            slot_mapping=slots,
            query_start_loc=np.array([0, 1, 1 + end - start], dtype=np.int32),
            seq_lens=np.array([1, end], dtype=np.int32),
            block_table=table[::-1].copy(),
            block_size=4,
            device=torch.device("cpu"),
            windows=shape.windows,
            is_softcapped=shape.is_softcapped,
        )
        with torch.inference_mode():
            logits = module(
                input_ids=torch.tensor([[3 + start, *tokens[start:end]]]),
                position_ids=batch.positions[None],
                use_cache=False,
                lmscope_batch=batch,
                lmscope_cache=cache,
            ).logits[0]
        rows.append(logits[1:])
    return torch.cat(rows)


@pytest.mark.parametrize("name", RUNS)
def test_what_passes_the_check_gives_the_logits_of_transformers(name):
    module = make_module(name, RUNS[name])
    plain = make_module(name, RUNS[name], attention="eager")
    plain.load_state_dict(module.state_dict())
    tokens = [5, 9, 33, 41, 2, 15, 8, 50, 60, 21, 7, 40, 3]

    shape = check_supported(module)

    with torch.inference_mode():
        expected = plain(torch.tensor([tokens])).logits[0]
    logits = paged_logits(module, shape, tokens, cuts=[5, 6, 11, 12])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_shape_is_what_was_seen_in_a_forward():
    shape = check_supported(make_module("Gemma2", RUNS["Gemma2"]))

    assert shape == ModelShape(
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=64,
        windows=(4, None),
        is_softcapped=True,
    )
    plain = check_supported(make_module("Qwen3", COMMON))
    assert (plain.windows, plain.is_softcapped) == ((None,), False)


def test_a_window_that_no_class_asks_for_means_nothing():
    """Hub configs are full of keys that were copied along."""
    shape = check_supported(make_module("Llama", {**COMMON, "sliding_window": 4}))

    assert shape.windows == (None,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_and_says_why(name):
    settings, reason = REFUSED[name]
    module = make_module(name, settings)

    with pytest.raises(ValueError, match=rf"^{name}\w* cannot run in lmscope: .*({reason})"):
        check_supported(module)


# As a user meets them: saved in a folder, and refused before there is an engine.
FOLDERS = {
    "Bloom": (*REFUSED["Bloom"],),
    "Mpt": (*REFUSED["Mpt"],),
    "Falcon": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "alibi": True},
        "its attention is its own and takes no other",
    ),
    "StableLm": (*REFUSED["StableLm"],),
    "Mamba": (*REFUSED["Mamba"],),
    "Lfm2": (*REFUSED["Lfm2"],),
    "Qwen3Next": ({**COMMON, **EXPERTS}, "linear_attention"),
    "Llama4": ({**COMMON, "num_local_experts": 2, "intermediate_size_mlp": 32}, "chunked"),
    "GptOss": (*REFUSED["GptOss"],),
    "T5": (
        {"vocab_size": 64, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8},
        "it is an encoder-decoder model",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOLDERS)
def test_llm_refuses_by_name_and_says_why(tmp_path, name):
    settings, reason = FOLDERS[name]
    if name == "T5":
        config = transformers.T5Config(**settings)
        module = transformers.T5ForConditionalGeneration(config)
    else:
        module = make_module(name, settings, attention="eager")
    module.save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=rf"(?i)\b{name}.*({reason})"):
        LLM(tmp_path, num_kv_blocks=8)


def test_refuses_a_module_that_places_tokens_by_their_row():
    module = make_module("Llama", COMMON)
    rotary = module.model.rotary_emb
    plain_forward = rotary.forward

    def by_row(x, position_ids):
        return plain_forward(x, torch.arange(position_ids.shape[1])[None])

    rotary.forward = by_row

    with pytest.raises(ValueError, match="layer 0 places tokens by their row"):
        check_supported(module)


def test_refuses_a_module_that_mixes_tokens_outside_attention():
    module = make_module("Llama", COMMON)
    mlp = module.model.layers[0].mlp
    plain_forward = mlp.forward

    def with_memory(x):
        return plain_forward(x) + 0.1 * x.cumsum(dim=1)

    mlp.forward = with_memory

    with pytest.raises(ValueError, match="state from token to token"):
        check_supported(module)


def test_refuses_a_layer_that_leaves_attention_out():
    module = make_module("Llama", COMMON)
    module.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)

    with pytest.raises(ValueError, match="of its 2 layers, 1 call attention"):
        check_supported(module)


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_named(damage):
    module = make_module("Llama", COMMON)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight[3, 3:5] = damage

    with pytest.raises(ValueError, match=r"since 2 of 2048 in model\.layers\.1\.mlp\.down_proj\.w"):
        check_supported(module)


def test_numbers_that_become_too_large_name_the_dtype():
    module = make_module("Llama", COMMON)
    with torch.no_grad():
        module.lm_head.weight.fill_(6e4)
        module.model.norm.weight.copy_(torch.arange(32) * 100.0)
    module.half()

    with pytest.raises(ValueError, match=r"more than float16 holds; use dtype='float32'"):
        check_supported(module)
