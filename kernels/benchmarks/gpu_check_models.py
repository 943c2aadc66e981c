"""Models for gpu_check.py: shapes of real ones, random weights, and goals.

Each is written to a folder, so that the engine loads it as it loads any.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["MODELS", "TINY", "Model", "model_folder", "remove_models"]


class Model(NamedTuple):
    """A model of random weights, and what its steps are to take.

    step_goals_ms    by the number of requests, at a context of 1,024
    prefill_goal_ms  of one prompt of 2,048 tokens
    estimate_s       to write, load and measure it
    """

    name: str
    config: dict[str, Any]
    step_goals_ms: dict[int, float | None]
    prefill_goal_ms: float | None
    estimate_s: float


_LLAMA = {"model_type": "llama", "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
MODELS = (
    Model(
        "Qwen3-0.6B",
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
        },
        {1: 0.90, 16: 1.4, 64: 3.0, 256: 9.5},
        6.0,
        45.0,
    ),
    Model(
        "Llama-3.2-1B",
        {
            **_LLAMA,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
        {1: 1.0, 16: 1.2, 64: 1.7, 256: 3.6},
        9.0,
        40.0,
    ),
    Model(
        "Llama-3.1-8B",
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
        },
        {1: 4.2, 16: 5.0, 64: 6.9, 256: 15.0},
        55.0,
        90.0,
    ),
)
TINY = Model(
    "tiny",
    {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    {1: None, 2: None},
    None,
    0.0,
)
# Of folders with weights, by the name of the model; they go at the end of the run.
_folders: dict[str, Path] = {}


def model_folder(model: Model) -> Path:
    """A folder with the model's config and random weights, written at its first use."""
    if model.name in _folders:
        return _folders[model.name]
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = _folders[model.name] = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    settings = dict(model.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    # With it the engine maps the file of weights, where it would copy all of them first.
    GenerationConfig().save_pretrained(folder)
    tensors = {
        name: tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    _write_random(folder / "model.safetensors", tensors)
    return folder


def _write_random(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16: ones for norms, and else numbers of a spread of 0.02.

    One piece of random numbers over and over: gigabytes are written at the speed of the disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes = {}
    offset = 0
    for name, shape in shapes.items():
        sizes[name] = 2 * torch.Size(shape).numel()
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # An odd number, so that two rows of a matrix are never the same.
    piece = (torch.randn((1 << 22) + 1) * 0.02).bfloat16().view(torch.int16).numpy().tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            if len(shape) == 1:
                file.write(torch.ones(shape).bfloat16().view(torch.int16).numpy().tobytes())
                continue
            left = sizes[name]
            while left:
                left -= file.write(piece[: min(left, len(piece))])


def remove_models() -> None:
    """Delete the folders that the items left for each other."""
    while _folders:
        shutil.rmtree(_folders.popitem()[1], ignore_errors=True)
