"""Files and configs as users bring them, through LLM: what runs is right, the rest is told.

Names begin with the row of the hard cases that a test answers, W1 to W6.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lmscope import LLM, SamplingParams
from lmscope.testing import byte_tokenizer

TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT = [5, 9, 33, 41, 7, 15, 8, 50, 60, 21, 7, 40, 3]
WEIGHTS = "model.safetensors"


def save_model(folder: Path, kind: str = "Llama", **settings):
    """A tiny model in `folder`; its biases are numbers too, where it has any."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SETTINGS, **settings})
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    module.save_pretrained(folder)
    return module


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: config[key] for key in config if key not in remove}))


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def load(model, **options) -> LLM:
    return LLM(model, threads=1, **{"num_kv_blocks": 16, "exact": True, **options})


def logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Log probability of each token of the prompt after the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    entries = output.prompt_logprobs[1:]
    return torch.tensor([e[t].logprob for e, t in zip(entries, prompt[1:], strict=True)])


def expected_logprobs(folder: Path, prompt: list[int]) -> torch.Tensor:
    """The same by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        rows = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def assert_equals_transformers(folder: Path, prompt: list[int] = PROMPT, **options) -> None:
    with load(folder, **options) as llm:
        ours = logprobs(llm, prompt)
    torch.testing.assert_close(ours, expected_logprobs(folder, prompt), atol=TOLERANCE, rtol=0)


# -- W1: tied weights --------------------------------------------------------------------------


def test_w1_a_tied_model_without_a_head_uses_its_embedding(tmp_path):
    save_model(tmp_path, tie_word_embeddings=True)

    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    assert_equals_transformers(tmp_path)


def test_w1_a_tied_model_with_its_head_saved_too_is_the_same(tmp_path):
    module = save_model(tmp_path, tie_word_embeddings=True)
    head = module.lm_head.weight.detach().clone()
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": head}))

    assert_equals_transformers(tmp_path)


def test_w1_another_head_of_a_tied_model_is_ignored_and_said(tmp_path, caplog):
    save_model(tmp_path, tie_word_embeddings=True)
    expected = expected_logprobs(tmp_path, PROMPT)
    other = torch.randn(64, 32)
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": other}))

    with caplog.at_level(logging.WARNING, logger="lmscope"), load(tmp_path) as llm:
        ours = logprobs(llm, PROMPT)

    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert "has a head other than its embedding" in caplog.text


def test_w1_the_head_of_an_untied_model_is_used(tmp_path):
    save_model(tmp_path)

    assert "lm_head.weight" in load_file(tmp_path / WEIGHTS)
    assert_equals_transformers(tmp_path)


# -- W2, W3: heads and biases ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_w2_a_head_size_that_is_given_is_used(tmp_path, kind):
    save_model(tmp_path, kind, hidden_size=64, head_dim=32)

    with load(tmp_path, block_size=4) as llm:
        ours = logprobs(llm, PROMPT)
        assert "x 4 tokens x 2 KV heads x 32 x 4 bytes" in str(llm)
    torch.testing.assert_close(ours, expected_logprobs(tmp_path, PROMPT), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen2", {}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"mlp_bias": True}),
        ("GPTNeoX", {"attention_bias": True}),
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
        ("Granite", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_w3_biases_count(tmp_path, kind, settings):
    save_model(tmp_path, kind, **settings)
    whole = expected_logprobs(tmp_path, PROMPT)

    assert_equals_transformers(tmp_path)

    def clear(weights):
        for name in weights:
            if name.endswith("bias"):
                weights[name] = torch.zeros_like(weights[name])

    edit_weights(tmp_path, clear)
    assert (expected_logprobs(tmp_path, PROMPT) - whole).abs().max() > 0.01


def test_w3_a_bias_that_the_model_does_not_have_is_named(tmp_path):
    save_model(tmp_path)
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_weights(tmp_path, lambda weights: weights.update({name: torch.zeros(32)}))

    with pytest.raises(ValueError, match=rf"missing nothing, unused \['{name}'\]"):
        load(tmp_path)


# -- W4: scaled rotary embeddings --------------------------------------------------------------

LONG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 16384,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "dynamic": {"factor": 2.0},
}  # fmt: skip


def set_rope(folder: Path, spelling: str, kind: str, **more: Any) -> None:
    """Write the scaling of a rotary embedding in one of the ways that config files have."""
    if spelling == "rope_parameters":
        edit_config(folder, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **more})
    else:
        scaling = {spelling: kind, **more}
        edit_config(folder, remove=("rope_parameters",), rope_scaling=scaling, rope_theta=1e4)


@pytest.mark.parametrize("kind", ROPES)
def test_w4_a_scaled_rotary_embedding_up_to_position_8192(tmp_path, kind):
    save_model(tmp_path, **LONG)
    set_rope(tmp_path, "rope_parameters", kind, **ROPES[kind])
    prompt = torch.randint(3, 32, (8194,), generator=torch.manual_seed(1)).tolist()

    with load(tmp_path, num_kv_blocks=600) as llm:
        ours = logprobs(llm, prompt)

    scaled = expected_logprobs(tmp_path, prompt)
    assert (ours - scaled).abs().max() < TOLERANCE
    set_rope(tmp_path, "rope_parameters", "default")
    plain = expected_logprobs(tmp_path, prompt)
    for position in (1000, 8192):
        # A dynamic one is plain up to the length that the model was made for.
        nearby = slice(position - 20, position + 1)
        is_same = (scaled[nearby] - plain[nearby]).abs().max() < TOLERANCE
        assert is_same == (kind == "dynamic")


@pytest.mark.parametrize("kind", ROPES)
def test_w4_every_spelling_means_the_same(tmp_path, kind):
    save_model(tmp_path, **LONG)
    frequencies = []
    for spelling in ("rope_parameters", "rope_type", "type"):
        set_rope(tmp_path, spelling, kind, **ROPES[kind])
        with load(tmp_path) as llm:
            frequencies.append(llm.module.model.rotary_emb.inv_freq.clone())

    assert torch.equal(frequencies[0], frequencies[1])
    assert torch.equal(frequencies[0], frequencies[2])
    assert not frequencies[0].isnan().any()


def test_w4_a_dynamic_one_runs_up_to_the_length_where_it_would_change(tmp_path, caplog):
    save_model(tmp_path)
    set_rope(tmp_path, "type", "dynamic", factor=4.0)

    with caplog.at_level(logging.WARNING, logger="lmscope"), load(tmp_path) as llm:
        assert llm.config.max_model_len == 128
        with pytest.raises(ValueError, match="128"):
            llm.submit({"prompt_token_ids": [5] * 200})
    assert "(dynamic) changes for all of a batch" in caplog.text
    assert "longer than 128 tokens" in caplog.text
    with pytest.raises(ValueError, match="max_model_len is 512, the model was made for 128"):
        load(tmp_path, max_model_len=512, num_kv_blocks=64)


def test_w4_longrope_runs_with_its_short_factors(tmp_path, caplog):
    """Phi-3 with 128k tokens, in small."""
    settings = {"num_attention_heads": 2, "original_max_position_embeddings": 32}
    save_model(tmp_path, "Phi3", **settings)
    factors = {"short_factor": [1.0 + 0.2 * i for i in range(8)], "long_factor": [4.0] * 8}
    set_rope(tmp_path, "type", "longrope", **factors)
    prompt = [*PROMPT, *PROMPT, 4, 5, 6, 9, 8]

    with caplog.at_level(logging.WARNING, logger="lmscope"), load(tmp_path) as llm:
        assert llm.config.max_model_len == 32
        ours = logprobs(llm, prompt)

    assert (ours - expected_logprobs(tmp_path, prompt)).abs().max() < TOLERANCE
    assert "(longrope) changes for all of a batch" in caplog.text
    factors["short_factor"] = [1.0] * 8
    set_rope(tmp_path, "type", "longrope", **factors)
    assert (ours - expected_logprobs(tmp_path, prompt)).abs().max() > 0.01


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
def test_w4_an_unknown_type_is_an_error_that_names_the_nearest(tmp_path, spelling):
    save_model(tmp_path)
    set_rope(tmp_path, spelling, "yarm", factor=2.0)

    with pytest.raises(ValueError, match=r"rotary embedding is of type 'yarm'; did you mean yarn"):
        load(tmp_path)


# -- W5: the size of the cache -----------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_w5_bytes_per_block_come_from_the_kv_heads(tmp_path, dtype, bytes_each):
    save_model(tmp_path, head_dim=16)
    caches = []

    with load(tmp_path, block_size=8, num_kv_blocks=10, dtype=dtype) as llm:
        llm.module.register_forward_pre_hook(
            lambda module, args, kwargs: caches.append(kwargs["lmscope_cache"]), with_kwargs=True
        )
        llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1), use_tqdm=False)
        shown = str(llm)

    allocated = sum(tensor.nbytes for tensor in (*caches[0].key, *caches[0].value))
    per_block = 2 * 2 * 8 * 2 * 16 * bytes_each
    assert allocated == 10 * per_block
    formula = f"2 (K and V) x 2 layers x 8 tokens x 2 KV heads x 16 x {bytes_each} bytes"
    assert formula in shown


# -- W6: what is missing -----------------------------------------------------------------------


def in_parts(folder: Path, module) -> list[Path]:
    (folder / WEIGHTS).unlink()
    module.save_pretrained(folder, max_shard_size="20KB")
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 2
    return parts


def test_w6_a_part_that_is_missing_is_named_with_a_tensor_of_it(tmp_path):
    part = in_parts(tmp_path, save_model(tmp_path))[1]
    tensor = next(iter(load_file(part)))
    part.unlink()

    with pytest.raises(ValueError, match=rf"lacks {part.name}, which holds .* among them {tensor}"):
        load(tmp_path)


def test_w6_parts_without_their_index_are_refused(tmp_path):
    parts = in_parts(tmp_path, save_model(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()

    with pytest.raises(ValueError, match=rf"has {parts[0].name} and neither .*index\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_w6_an_index_that_is_none_is_refused(tmp_path, content):
    in_parts(tmp_path, save_model(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(content)

    with pytest.raises(ValueError, match=r"index\.json is not an index of weights"):
        load(tmp_path)


def test_w6_a_tensor_that_is_missing_is_named_with_its_file(tmp_path):
    save_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tmp_path, lambda weights: weights.pop(name))

    with pytest.raises(ValueError, match=rf"missing \['{name}'\] in model\.safetensors, unused"):
        load(tmp_path)


def test_w6_a_tensor_that_is_missing_from_a_part_is_named_with_the_part(tmp_path):
    part = in_parts(tmp_path, save_model(tmp_path))[1]
    weights = load_file(part)
    name = next(iter(weights))
    del weights[name]
    save_file(weights, part, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=rf"missing \['{name}'\] in {part.name}, unused"):
        load(tmp_path)


# -- folders, hub ids and GGUF files -----------------------------------------------------------


def test_a_folder_without_a_config(tmp_path):
    save_model(tmp_path)
    (tmp_path / "config.json").unlink()

    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)


def test_a_folder_without_weights(tmp_path):
    save_model(tmp_path)
    (tmp_path / WEIGHTS).unlink()

    with pytest.raises(ValueError, match=r"has no weights; it must hold model\.safetensors"):
        load(tmp_path)


def test_pickled_weights_are_refused_unread(tmp_path):
    save_model(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    trace = tmp_path / "read"
    code = f"cos\nsystem\n(S'touch {trace}'\ntR."
    (tmp_path / "pytorch_model.bin").write_text(code)

    with pytest.raises(ValueError, match=r"pytorch_model\.bin, .* lmscope reads safetensors only"):
        load(tmp_path)
    assert not trace.exists()


def test_a_folder_of_an_unknown_architecture(tmp_path):
    save_model(tmp_path)
    edit_config(tmp_path, model_type="not_a_model")

    with pytest.raises(ValueError, match=r"cannot be loaded .*`not_a_model`"):
        load(tmp_path)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """The folder of someone/tiny in an otherwise empty cache of the hub, offline."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    refs = cache / "models--someone--tiny" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(commit)
    return refs.parent / "snapshots" / commit


def test_a_hub_id_in_the_cache_runs_without_a_network(hub_cache):
    save_model(hub_cache)

    with load("someone/tiny", tokenizer=byte_tokenizer()) as llm:
        ours = logprobs(llm, PROMPT)
        assert llm.model == "someone/tiny"
        assert llm.tokenizer.encode("Hi").ids == [72, 105]

    assert (ours - expected_logprobs(hub_cache, PROMPT)).abs().max() < TOLERANCE


def test_a_hub_id_that_is_not_in_the_cache_is_an_error_offline(hub_cache):
    with pytest.raises(
        ValueError, match=r"'someone/else' cannot be loaded .*check the name and the connection"
    ):
        load("someone/else")


def test_a_hub_id_with_pickled_weights_only(hub_cache):
    save_model(hub_cache)
    (hub_cache / WEIGHTS).rename(hub_cache / "pytorch_model.bin")

    with pytest.raises(ValueError, match=r"'someone/tiny' cannot be .* it has no safetensors"):
        load("someone/tiny", tokenizer=byte_tokenizer())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_runs(tmp_path, cache, write_gguf, kind):
    original = write_gguf(tmp_path / "tiny.gguf", kind)

    with load(str(tmp_path / "tiny.gguf")) as llm:
        ours = logprobs(llm, PROMPT)
        assert Path(llm.model).parent == cache / "gguf"
        assert llm.tokenizer.encode("b", add_special_tokens=False).ids == [
            llm.tokenizer.token_to_id("b")
        ]

    with torch.inference_mode():
        rows = original(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(dim=-1)
    expected = rows.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert (ours - expected).abs().max() < TOLERANCE


def test_a_gguf_file_of_another_architecture(tmp_path, cache):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "rwkv7")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(
        ValueError, match=r"architecture 'rwkv7'; GGUF files of llama, qwen2, qwen3 can be read"
    ):
        load(tmp_path / "m.gguf")
    assert not (cache / "gguf").exists()


def test_the_tokenizer_of_a_folder_comes_without_autotokenizer(demo_model, monkeypatch):
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", pytest.fail)

    with load(demo_model) as llm:
        assert llm.tokenizer.encode("123").ids == [33, 34, 35]
        assert llm.tokenizer.eos_token_id == 2
