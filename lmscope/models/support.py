"""Whether lmscope can run a module: one probe forward and its config, checked together.

transformers lets any model be told to use our attention function. Some never call it, some
call it for part of what they do, some mean more by the call than it can say. Each of these
would give wrong text without an error, so a model runs only when nothing is left open.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lmscope.models.attention import AttentionCall, AttentionProbe

__all__ = ["ModelShape", "check_supported"]

# Values with which a keyword changes nothing; None is always one of them.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "dropout": (0.0,),
    "use_cache": (False,),
    "is_causal": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}
# Acted on by us (scaling) or by the module itself before it called (position_ids).
_KNOWN = frozenset({"scaling", "position_ids"})
_LAYER_TYPES = frozenset({"full_attention"})
# These stretch by the longest position of a forward, which here holds many requests.
_ROPE_TYPES_BY_LENGTH = frozenset({"dynamic", "longrope"})
_TOLERANCE = 1e-3


class ModelShape(NamedTuple):
    """What a KV cache and a sampler must know, as seen in a forward; the same in all layers."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int


def check_supported(module: torch.nn.Module) -> ModelShape:
    """Raise ValueError, with the model's name and the reason, unless it runs right.

    The probe is one forward over twice the same token, as two requests of one token each.
    Every layer must call our attention once, with keywords that are acted on or harmless,
    and both tokens must give the same logits: where they differ, something other than
    attention carries state from token to token, and from request to request.
    """
    name = type(module).__name__
    config: Any = module.config
    config = config.get_text_config(decoder=True)
    _check_config(name, config)
    probe = AttentionProbe()
    device = next(module.parameters()).device
    try:
        with torch.inference_mode():
            logits = module(
                input_ids=torch.ones(1, 2, dtype=torch.long, device=device),
                position_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
                use_cache=False,
                logits_to_keep=torch.arange(2, device=device),
                lmscope_batch=probe,
            ).logits[0]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(name, f"a forward with lmscope's attention fails: {error}") from error
    _check_calls(name, config.num_hidden_layers, probe.calls)
    if logits.shape[0] != 2:
        raise _refusal(name, "it does not compute logits for chosen tokens only")
    difference = (logits[0] - logits[1]).abs().max() / logits.abs().max().clamp(min=1e-6)
    if not difference <= _TOLERANCE:
        raise _refusal(name, "it carries state from token to token outside its attention")
    call = probe.calls[0]
    return ModelShape(
        num_layers=len(probe.calls),
        num_query_heads=call.num_query_heads,
        num_kv_heads=call.num_kv_heads,
        head_size=call.head_size,
        vocab_size=logits.shape[1],
    )


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is an encoder-decoder model")
    other_types = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other_types:
        raise _refusal(name, f"it has layers of type {', '.join(other_types)}")
    if getattr(config, "attention_chunk_size", None):
        raise _refusal(name, "its attention is chunked (attention_chunk_size)")
    rope = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if (kind := parameters.get("rope_type")) in _ROPE_TYPES_BY_LENGTH:
            raise _refusal(name, f"its rotary embedding ({kind}) depends on the prompt's length")


def _check_calls(name: str, num_layers: int, calls: list[AttentionCall]) -> None:
    layers = [call.layer for call in calls]
    if not calls:
        raise _refusal(name, "it does not call the attention function that it is given")
    if layers != list(range(num_layers)):
        raise _refusal(
            name, f"of its {num_layers} layers, {len(set(layers))} call attention, in {layers}"
        )
    for call in calls:
        if not call.is_causal:
            raise _refusal(name, f"the attention of layer {call.layer} is not causal")
        for keyword, value in call.keywords.items():
            is_harmless = value is None or (
                not isinstance(value, torch.Tensor) and value in _HARMLESS.get(keyword, ())
            )
            if keyword not in _KNOWN and not is_harmless:
                shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise _refusal(
                    name, f"the attention of layer {call.layer} needs {keyword} ({shown})"
                )
        if not isinstance(call.keywords.get("scaling"), float):
            raise _refusal(name, f"the attention of layer {call.layer} states no scaling")
    shapes = {(c.num_query_heads, c.num_kv_heads, c.head_size) for c in calls}
    if len(shapes) > 1:
        raise _refusal(name, f"its layers have attention of different shapes: {sorted(shapes)}")


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} cannot run in lmscope: {reason}; models with the shape of Llama, Qwen2 or "
        "Qwen3 can"
    )
