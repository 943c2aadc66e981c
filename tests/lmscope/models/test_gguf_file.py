"""A GGUF file becomes a folder that transformers loads, with the same numbers in it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmscope.models import gguf_file
from lmscope.models.gguf_file import convert_gguf


@pytest.fixture
def converted(tmp_path, write_gguf):
    """Write a file, convert it; the module it was made from, and the folder."""

    def convert(kind="llama", **options):
        original = write_gguf(tmp_path / "tiny.gguf", kind, **options)
        folder = tmp_path / "folder"
        folder.mkdir()
        convert_gguf(tmp_path / "tiny.gguf", folder, show_progress=False)
        return original, folder

    return convert


def assert_same_weights(module, original):
    theirs = original.state_dict()
    ours = module.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_holds_the_weights_that_the_file_was_made_from(converted, kind, tied):
    original, folder = converted(kind, tie_word_embeddings=tied)

    module = AutoModelForCausalLM.from_pretrained(folder)

    assert type(module) is type(original)
    assert module.dtype == torch.float32
    assert_same_weights(module, original)
    with torch.inference_mode():
        tokens = torch.tensor([[5, 9, 33, 41]])
        torch.testing.assert_close(module(tokens).logits, original(tokens).logits)


def test_the_tokenizer_and_the_end_of_a_text_come_along(converted):
    _, folder = converted()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("b a", add_special_tokens=False)

    assert tokenizer.convert_ids_to_tokens(ids) == ["b", "Ġa"]
    assert tokenizer.eos_token_id == 257
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 257


def test_quantised_tensors_are_dequantised(converted):
    original, folder = converted(quantise="Q8_0")

    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    weights = original.model.layers[1].mlp.up_proj.weight.detach().numpy()
    expected = gguf.dequantize(
        gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )

    assert stored.dtype == torch.float32
    assert np.array_equal(stored.numpy(), expected)
    assert not np.array_equal(expected, weights)


def test_a_large_model_is_written_in_parts(converted, monkeypatch):
    monkeypatch.setattr(gguf_file, "_SHARD_BYTES", 40_000)
    original, folder = converted()

    parts = sorted(path.name for path in folder.glob("*.safetensors"))

    assert len(parts) > 2
    assert parts[0] == f"model-00001-of-{len(parts):05}.safetensors"
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), original)


def llama3_factors(**changes):
    """Divisors of the frequencies under Llama 3's scaling, as GGUF stores them."""
    settings = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, **changes,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=settings)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / settings["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    return settings, (plain / scaled).numpy()


def test_the_scaled_rotary_embedding_of_llama_3_is_recovered(converted):
    settings, factors = llama3_factors()
    plain = {"rope_type": "default", "rope_theta": 500_000.0}
    _, folder = converted(rope_factors=factors, rope_parameters=plain, head_dim=64)

    module = AutoModelForCausalLM.from_pretrained(folder)

    assert module.config.rope_parameters == settings


def test_another_scaling_of_the_rotary_embedding_is_refused(converted):
    _, factors = llama3_factors(high_freq_factor=9.0)
    plain = {"rope_type": "default", "rope_theta": 500_000.0}

    with pytest.raises(ValueError, match=r"not Llama 3's; load this model from safetensors"):
        converted(rope_factors=factors, rope_parameters=plain, head_dim=64)


def test_a_missing_tensor_is_named(converted):
    with pytest.raises(ValueError, match=r"missing \['blk.1.ffn_up.weight'\], unused nothing"):
        converted(leave_out=("blk.1.ffn_up.weight",))


def test_a_tensor_that_belongs_to_nothing_is_named(converted):
    with pytest.raises(ValueError, match=r"missing nothing, unused \['blk.0.attn_q.bias'\]"):
        converted(also=("blk.0.attn_q.bias",))


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ValueError, match="architecture 'mamba'; GGUF files of llama, qwen2, qwen3"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, show_progress=False)


@pytest.mark.parametrize("content", [b"", b"not a model at all" * 10, b"GGUF\x03\x00\x00\x00\x01"])
def test_a_file_that_is_no_gguf_file_is_refused(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)

    with pytest.raises(ValueError, match=r"m\.gguf is not a readable GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, show_progress=False)
