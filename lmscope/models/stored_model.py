"""Loads a model from a file that holds its parameters just as the module wants them.

For any other file transformers has from_pretrained, which gets ready to rename and convert the
parameters of all architectures that it knows before it reads the first: a tenth of a second of each
start. What comes out here is the same, and where there is a doubt nothing does.
"""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from lmscope.models.attention import ATTENTION_NAME
from lmscope.models.lean_names import FAMILIES

__all__ = ["load_stored"]

_HEAD = "lm_head.weight"


def load_stored(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The module over the mapped file, or None where from_pretrained must load it.

    It must unless the model is shaped like Llama, all is in one file and in `dtype`, and every
    parameter is there by its name and shape and nothing else is. With a generation config.
    """
    (architecture, *others) = getattr(config, "architectures", None) or ("",)
    family = architecture.removesuffix("ForCausalLM")
    if (
        family not in FAMILIES
        or others
        or any(hasattr(config, name) for name in ("auto_map", "quantization_config"))
        or (folder / "adapter_config.json").exists()
    ):
        return None
    try:
        stored = load_file(folder / "model.safetensors")
        generation_config = GenerationConfig.from_pretrained(folder)
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=ATTENTION_NAME
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError):
        return None  # from_pretrained meets the same, and the loader says what is wrong
    if type(module).__module__ != f"transformers.models.{family.lower()}.modeling_{family.lower()}":
        return None
    wanted = {name: value.shape for name, value in module.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted[_HEAD]
    if {name: value.shape for name, value in stored.items()} != wanted:
        return None
    if any(value.dtype != dtype for value in stored.values()):
        return None
    module.load_state_dict(stored, strict=False, assign=True)
    module.tie_weights()
    # Its frequencies are computed and not stored.
    body = module.model
    body.rotary_emb = type(body.rotary_emb)(config=body.config)
    if any(each.is_meta for each in chain(module.parameters(), module.buffers())):
        return None
    module.generation_config = generation_config
    return module.eval()
