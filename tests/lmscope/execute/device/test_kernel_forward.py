"""The lean forward of a GPU gives what the module of transformers gives."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
)

from lmscope.models.body import _difference
from lmscope.models.fuse import lean_layout
from lmscope.models.kernel_forward import KernelForward
from lmscope.models.linear import PlainLinears
from lmscope.models.loader import load_model
from lmscope.models.support import ModelShape
from lmscope.models.swap import linear_layers, weight_and_bias

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Norms of heads, norms after attention and MLP, and multipliers beside the plain layout.
FAMILIES = {
    "Llama": LlamaConfig,
    "Qwen3": Qwen3Config,
    "Olmo2": Olmo2Config,
    "Granite": GraniteConfig,
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_the_logits_of_the_module(tmp_path, family, dtype):
    torch.manual_seed(1)
    config = FAMILIES[family](
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8 if family in ("Olmo2", "Granite") else 16,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **({"residual_multiplier": 0.5, "logits_scaling": 2.0} if family == "Granite" else {}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype, device=DEVICE, show_progress=False)
    for parameter in loaded.module.parameters():
        # On a CPU they lie where the file has them; a GPU's begin at multiples of 16 bytes.
        parameter.data = parameter.data.clone()
    layout = lean_layout(loaded.module, takes_any_dtype=True)
    groups = layout.groups()
    grouped = {id(layer) for group in groups for layer in group}
    groups += [(x,) for x in linear_layers(loaded.module).values() if id(x) not in grouped]
    linears = {
        tuple(map(id, group)): PlainLinears().pack([weight_and_bias(layer) for layer in group])
        for group in groups
    }
    shape = ModelShape(**{name: getattr(loaded, name) for name in ModelShape._fields})
    forward = KernelForward(layout, linears, loaded.device)
    module = loaded.body(exact=True)._run_module

    assert _difference(forward, module, shape, loaded.device) is None
    # The companion: a forward that is wrong somewhere is found out.
    forward._epsilons = dict.fromkeys(forward._epsilons, 10.0)
    assert _difference(forward, module, shape, loaded.device) is not None
