"""A model loaded as it is stored is the one that from_pretrained loads, or is left to that."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lmscope.models.attention import ATTENTION_NAME
from lmscope.models.loader import load_model
from lmscope.models.stored_model import load_stored

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": False,
    "eos_token_id": [3, 5],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SHAPES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}),
    "granite": ("Granite", {}),
    "olmo2": ("Olmo2", {}),
}


def save(folder, kind="Llama", dtype=torch.float32, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | settings)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def load(folder, dtype=torch.float32):
    return load_stored(folder, AutoConfig.from_pretrained(folder), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "settings"), SHAPES.values(), ids=SHAPES)
def test_it_is_what_from_pretrained_loads(kind, settings, dtype, tmp_path):
    save(tmp_path, kind, dtype, **settings)

    got = load(tmp_path, dtype)

    wanted = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    assert got is not None
    for list_all in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(each, list_all)()) for each in (got, wanted))
        assert list(ours) == list(theirs)
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype
            assert value.device == theirs[name].device
            assert torch.equal(value, theirs[name]), name
    assert str(got) == str(wanted)
    assert [type(each) for each in got.modules()] == [type(each) for each in wanted.modules()]
    assert got.config.to_dict() == wanted.config.to_dict()
    assert got.config._attn_implementation == wanted.config._attn_implementation
    assert got.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert not any(each.training for each in got.modules())
    is_tied = got.lm_head.weight is got.model.embed_tokens.weight
    assert is_tied == settings.get("tie_word_embeddings", False)


def test_the_demo_model_is_loaded_so(demo_model, monkeypatch):
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was called")
    )
    assert load_model(demo_model, show_progress=False).parameter_bytes > 5e8


def test_what_does_not_fit_exactly_is_left_to_from_pretrained(tmp_path):
    folder = save(tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    assert load(folder) is not None
    assert load(folder, torch.bfloat16) is None

    def is_left(stored, **changes):
        save_file(stored, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(settings | changes))
        module = load(folder)
        save_file(tensors, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(settings))
        return module is None

    name = "model.layers.1.mlp.up_proj.weight"
    assert is_left({key: value for key, value in tensors.items() if key != name})
    assert is_left(tensors | {"more": torch.zeros(2)})
    assert is_left(tensors | {name: tensors[name][:-1].contiguous()})
    assert is_left(tensors | {name: tensors[name].half()})
    # A head of its own, which is to be tied: loading says so.
    assert is_left(tensors, tie_word_embeddings=True)
    assert is_left(tensors, architectures=["LlamaForSequenceClassification"])
    assert is_left(tensors, architectures=None)
    assert is_left(tensors, architectures=["MistralForCausalLM"])
    assert is_left(tensors, auto_map={"AutoModelForCausalLM": "other.Model"})
    assert is_left(tensors, quantization_config={"quant_method": "fp8"})
    weights.write_bytes(b"none")
    assert load(folder) is None
    save_file(tensors, weights)
    for trouble in ("adapter_config.json", None):
        if trouble is None:
            (folder / "generation_config.json").unlink()
        else:
            (folder / trouble).write_text("{}")
        assert load(folder) is None
        (folder / "adapter_config.json").unlink(missing_ok=True)
    shutil.rmtree(folder)
    assert load_stored(folder, transformers.LlamaConfig(**TINY), torch.float32) is None
    assert load(save(tmp_path / "phi", "Phi3", pad_token_id=0)) is None
