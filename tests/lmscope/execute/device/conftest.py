"""Engines with the Triton back end: interpreted on a CPU, in a process of its own, or on a GPU.

test_device_engine.py starts that process with TRITON_INTERPRET=1 and LMSCOPE_CHECK=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.parent == HERE and not IS_INTERPRETED and not torch.cuda.is_available():
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside of the interpreter, all of these need a GPU; some need one in any case."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        if not IS_INTERPRETED:
            item.add_marker("gpu")
        elif item.path.name == "test_gpu.py":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder("gemma2", sliding_window=7)` -> the folder of a tiny model, made once.

    Weights are large, so that logits depend on every token.
    """
    from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

    configs = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma2": Gemma2Config}
    made: dict[Any, Path] = {}

    def make(kind: str, **changes: Any) -> Path:
        key = kind, tuple(sorted(changes.items()))
        if key not in made:
            settings = {
                "vocab_size": 97,
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 128,
                "initializer_range": 0.5,
                "tie_word_embeddings": False,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **changes,
            }
            folder = tmp_path_factory.mktemp(kind)
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(configs[kind](**settings)).save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make
