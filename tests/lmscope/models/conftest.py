"""Tiny GGUF files and the models that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 257,
}


def byte_alphabet() -> list[str]:
    """A printable character for each byte, as byte-level BPE writes it."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture
def write_gguf() -> Callable[..., Any]:
    """`write_gguf(path, "llama", ...)` writes a GGUF file and returns the module it holds.

    rope_factors    the tensor that GGUF keeps for scaled rotary embeddings
    leave_out       names of tensors in the file that are not written
    also            names of tensors that are written and belong to nothing
    quantise        how matrices are stored; "" for float32
    config          changes of the config
    """
    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    configs = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    archs = {
        "llama": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2,
        "qwen3": gguf.MODEL_ARCH.QWEN3,
    }

    def permuted(array: Any, num_heads: int) -> Any:
        # Rows i and i + D/2 of a head side by side: what llama.cpp's converter does.
        halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)

    def write(
        path: Path,
        kind: str = "llama",
        *,
        rope_factors: Any = None,
        leave_out: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
        quantise: str = "",
        **changes: Any,
    ) -> Any:
        settings = {**TINY, "tie_word_embeddings": True, **changes}
        head_dim = settings.setdefault("head_dim", 16)
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(configs[kind](**settings)).eval()
        writer = gguf.GGUFWriter(str(path), kind)
        writer.add_name("tiny")
        writer.add_block_count(settings["num_hidden_layers"])
        writer.add_context_length(settings["max_position_embeddings"])
        writer.add_embedding_length(settings["hidden_size"])
        writer.add_feed_forward_length(settings["intermediate_size"])
        writer.add_head_count(settings["num_attention_heads"])
        writer.add_head_count_kv(settings["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(module.config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
        writer.add_vocab_size(settings["vocab_size"])
        tokens = [*byte_alphabet(), "Ġa", "<|end|>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 257 + [3])
        writer.add_token_merges(["Ġ a"])
        writer.add_bos_token_id(settings["bos_token_id"])
        writer.add_eos_token_id(settings["eos_token_id"])
        names = gguf.get_tensor_name_map(archs[kind], settings["num_hidden_layers"])
        for name, parameter in module.named_parameters():
            array = parameter.detach().numpy()
            if kind == "llama" and ".q_proj." in name:
                array = permuted(array, settings["num_attention_heads"])
            if kind == "llama" and ".k_proj." in name:
                array = permuted(array, settings["num_key_value_heads"])
            stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if stored_name in leave_out:
                continue
            array = np.ascontiguousarray(array)
            if quantise and array.ndim == 2:
                kind_of_block = gguf.GGMLQuantizationType[quantise]
                quantised = gguf.quantize(array, kind_of_block)
                writer.add_tensor(stored_name, quantised, raw_dtype=kind_of_block)
            else:
                writer.add_tensor(stored_name, array)
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
        for name in also:
            writer.add_tensor(name, np.zeros(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return module

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder of its own for a test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LMSCOPE_CACHE", str(folder))
    return folder
