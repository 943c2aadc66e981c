"""Whether lmscope can run a module: one probe forward and its config, checked together.

transformers lets any model be told to use our attention function. Some never call it, some
call it for part of what they do, some mean more by the call than it can say. Each of these
would give wrong text without an error, so a model runs only when nothing is left open.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import torch

from lmscope.models.attention import AttentionCall, AttentionProbe, NoBatchError

__all__ = ["ModelShape", "check_supported", "longest_unstretched_length", "rope_settings"]

# Values with which a keyword changes nothing; None is always one of them.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "dropout": (0.0,),
    "use_cache": (False,),
    "is_causal": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}
# Acted on by us, or (position_ids) by the module itself before it called.
_KNOWN = frozenset({"scaling", "sliding_window", "softcap", "position_ids"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = 1e-3


class ModelShape(NamedTuple):
    """What a KV cache, a batch and a sampler must know, as seen in a forward.

    num_query_heads, num_kv_heads, head_size    the same in all layers
    windows          each sliding window that some layer has, once; None: a layer without one
    is_softcapped    some layer has a soft cap
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    is_softcapped: bool


def check_supported(module: torch.nn.Module) -> ModelShape:
    """Raise ValueError, with the model's name and the reason, unless it runs right.

    The probe is one forward over twice the same token, as two requests of one token each.
    Every layer must call our attention once, with keywords that are acted on or harmless and
    a window that is the one in its config. Both tokens must give the same logits: where they
    differ, something other than attention carries state from token to token, and from request
    to request. They must also give the same queries and keys: where these differ, a token is
    placed by its row in the batch and not by its position.
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
    except NoBatchError as error:
        raise _refusal(name, "it does not hand keyword arguments on to its attention") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        where = "after" if probe.calls else "before"
        raise _refusal(
            name, f"its forward fails {where} it has called the attention it is given: {error}"
        ) from error
    _check_calls(name, config, probe.calls)
    if logits.shape[0] != 2:
        raise _refusal(name, "it does not compute logits for chosen tokens only")
    difference = (logits[0] - logits[1]).abs().max() / logits.abs().max().clamp(min=1e-6)
    if difference.isnan():
        raise ValueError(_why_no_numbers(name, module))
    if not difference <= _TOLERANCE:
        raise _refusal(name, "it carries state from token to token outside its attention")
    for each in probe.calls:
        if not each.difference <= _TOLERANCE:
            raise _refusal(
                name, f"layer {each.layer} places tokens by their row and not by position_ids"
            )
    call = probe.calls[0]
    return ModelShape(
        num_layers=len(probe.calls),
        num_query_heads=call.num_query_heads,
        num_kv_heads=call.num_kv_heads,
        head_size=call.head_size,
        vocab_size=logits.shape[1],
        windows=tuple(dict.fromkeys(each.window for each in probe.calls)),
        is_softcapped=any(each.keywords.get("softcap") is not None for each in probe.calls),
    )


def longest_unstretched_length(config: Any) -> tuple[str, int] | None:
    """The type of a rotary embedding that depends on lengths, and the length where it begins to.

    None when the embedding is the same at any length. Otherwise transformers stretches it by
    the longest position in a forward, and a forward here holds many requests; up to the length
    that is returned it never does.
    """
    for rope in rope_settings(config):
        kind = rope.get("rope_type")
        if kind == "dynamic":
            return kind, config.max_position_embeddings
        if kind == "longrope":
            return kind, rope["original_max_position_embeddings"]
    return None


def rope_settings(config: Any) -> tuple[dict[str, Any], ...]:
    """The settings of a rotary embedding: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = tuple(each for each in rope.values() if isinstance(each, dict))
    return by_layer_type or (rope,)


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is an encoder-decoder model")
    other_types = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other_types:
        raise _refusal(name, f"it has layers of type {', '.join(other_types)}")
    if getattr(config, "attention_chunk_size", None):
        raise _refusal(name, "its attention is chunked (attention_chunk_size)")


def _check_calls(name: str, config: Any, calls: list[AttentionCall]) -> None:
    layers = [call.layer for call in calls]
    num_layers = config.num_hidden_layers
    if not calls:
        raise _refusal(name, "it does not call the attention function that it is given")
    if layers != list(range(num_layers)):
        raise _refusal(
            name, f"of its {num_layers} layers, {len(set(layers))} call attention, in {layers}"
        )
    for call in calls:
        where = f"the attention of layer {call.layer}"
        if not call.is_causal:
            raise _refusal(name, f"{where} is not causal")
        for keyword, value in call.keywords.items():
            is_harmless = value is None or (
                not isinstance(value, torch.Tensor) and value in _HARMLESS.get(keyword, ())
            )
            if keyword not in _KNOWN and not is_harmless:
                shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise _refusal(name, f"{where} needs {keyword} ({shown})")
        if not isinstance(call.keywords.get("scaling"), float):
            raise _refusal(name, f"{where} states no scaling")
        softcap = call.keywords.get("softcap")
        if softcap is not None and not (isinstance(softcap, (int, float)) and softcap > 0):
            raise _refusal(name, f"{where} has a soft cap of {softcap!r}")
        # Some models say it in the mask only, which we do not read.
        expected = _window(config, call.layer)
        if call.window != expected or (expected is not None and expected < 1):
            raise _refusal(
                name,
                f"{where} has a window of {expected} tokens in its config, and asks for "
                f"{call.window}",
            )
        if call.value_size != call.head_size:
            raise _refusal(
                name, f"{where} has keys of {call.head_size} and values of {call.value_size}"
            )
    shapes = {(c.num_query_heads, c.num_kv_heads, c.head_size) for c in calls}
    if len(shapes) > 1:
        raise _refusal(name, f"its layers have attention of different shapes: {sorted(shapes)}")


def _window(config: Any, layer: int) -> int | None:
    """The sliding window that the config gives to a layer."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    # What a config.json holds beyond the fields of its class is an attribute that no model reads.
    kind = type(config)
    if not hasattr(kind, "sliding_window") and "sliding_window" not in signature(kind).parameters:
        return None
    window: int | None = config.sliding_window
    return window


def _why_no_numbers(name: str, module: torch.nn.Module) -> str:
    for parameter_name, parameter in module.named_parameters():
        count = parameter.numel() - int(parameter.isfinite().sum())
        if count:
            return (
                f"the logits of this {name} are not numbers, since {count} of "
                f"{parameter.numel()} in {parameter_name} are not; fetch its files again"
            )
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    advice = "use dtype='float32'" if dtype != "float32" else "save it anew"
    return (
        f"the logits of this {name} are not numbers, though all of its weights are: what it "
        f"computes is more than {dtype} holds; {advice}"
    )


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} cannot run in lmscope: {reason}; Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2 and "
        "models with attention like theirs can"
    )
