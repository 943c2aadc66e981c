"""The lean forwards of a GPU give what the module of transformers gives."""

from __future__ import annotations

import os

import pytest
import torch
from lmscope_kernels import rms_norm, silu_mul, store_kv, unified_attention
from lmscope_kernels.launches import Launches
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
)

from lmscope.models import kernel_attention
from lmscope.models.body import _difference
from lmscope.models.fuse import lean_layout
from lmscope.models.kernel_forward import KernelForward
from lmscope.models.kernel_invariant import KernelInvariantForward, KernelInvariantLinears
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


FAMILIES_SETTINGS = {
    "Granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "Llama": {"attention_bias": True},
}
FORWARDS = {
    "default": (KernelForward, PlainLinears),
    "invariant": (KernelInvariantForward, KernelInvariantLinears),
}


def save(folder, family, **settings):
    torch.manual_seed(1)
    config = FAMILIES[family](
        **{
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8 if family in ("Olmo2", "Granite") else 16,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **FAMILIES_SETTINGS.get(family, {}),
            **settings,
        }
    )
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    module.save_pretrained(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", FORWARDS)
def test_it_gives_the_logits_of_the_module(tmp_path, kind, family, dtype):
    save(tmp_path, family)
    forward, module, shape, device = built(tmp_path, kind, dtype)

    assert _difference(forward, module, shape, device) is None
    # The companion: a forward that is wrong somewhere is found out.
    forward._norms = {key: (weight, 10.0) for key, (weight, _) in forward._norms.items()}
    assert _difference(forward, module, shape, device) is not None


def built(folder, kind, dtype):
    """A forward of what was saved, the module's own, its shape and device."""
    loaded = load_model(folder, dtype=dtype, device=DEVICE, show_progress=False)
    layout = lean_layout(loaded.module, takes_any_dtype=True)
    groups = layout.groups()
    grouped = {id(layer) for group in groups for layer in group}
    groups += [(x,) for x in linear_layers(loaded.module).values() if id(x) not in grouped]
    forward_of, linears_of = FORWARDS[kind]
    linears = {
        tuple(map(id, group)): linears_of().pack([weight_and_bias(layer) for layer in group])
        for group in groups
    }
    shape = ModelShape(**{name: getattr(loaded, name) for name in ModelShape._fields})
    forward = forward_of(layout, linears, loaded.device)
    return forward, loaded.body(exact=True)._run_module, shape, loaded.device


@pytest.mark.parametrize("kind", FORWARDS)
def test_layers_behind_the_first_are_not_checked_again(tmp_path, kind, monkeypatch):
    checked, stored = [], []
    keep, store = Launches.keep, kernel_attention.store_kv
    monkeypatch.setattr(Launches, "keep", lambda *given: checked.append(given[1]) or keep(*given))
    monkeypatch.setattr(
        kernel_attention, "store_kv", lambda *given: stored.append(given[0]) or store(*given)
    )

    def counted(num_layers):
        """How often a launcher checked what it was given, and how many layers have run."""
        checked.clear()
        stored.clear()
        for launcher in (rms_norm, silu_mul, store_kv, unified_attention):
            monkeypatch.setattr(launcher, "_launches", Launches())
        folder = tmp_path / str(num_layers)
        save(folder, "Qwen3", num_hidden_layers=num_layers)
        assert _difference(*built(folder, kind, "float32")) is None
        return len(checked), len(stored)

    few, many = counted(2), counted(5)

    assert few[0] == many[0] > 0
    assert many[1] * 2 == few[1] * 5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_act": "gelu"}, "its activation is not SiLU"),
        ({"hidden_size": 42}, "its hidden size is 42, and the kernels take multiples of 16"),
        ({"intermediate_size": 60}, "its intermediate size is 60, and"),
        ({"head_dim": 12, "num_attention_heads": 2}, "its heads together is 24, and"),
        ({"hidden_size": 16416, "num_hidden_layers": 1}, "16416, and the kernels norm up to 16384"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused_by_name(tmp_path, settings, reason):
    save(tmp_path, "Llama", **settings)
    loaded = load_model(tmp_path, device=DEVICE, show_progress=False)

    with pytest.raises(ValueError, match=f"LlamaForCausalLM cannot be run so: .*{reason}"):
        loaded.body(exact=True, batch_invariant=True, attention_backend="triton")
