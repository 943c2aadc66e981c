"""A lean forward for models shaped like Llama: the same numbers as the module, by fewer calls.

What it computes is written down once, in `LeanForward.__call__`. A family differs from Llama in
few places: where its norms stand, norms of queries and keys, layers without positions,
multipliers. `lean_layout` reads these off a module, and refuses one in which anything is left
that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.compiled_layers import compiled_layers
from lmscope.models.int8_step import int8_step
from lmscope.models.lean_names import FAMILIES, LINEARS_OF_ATTENTION, LINEARS_OF_MLP
from lmscope.models.linear import Linear
from lmscope.models.support import longest_unstretched_length
from lmscope.models.swap import linear_layers

__all__ = ["LeanForward", "LeanLayout", "NotLean", "RotaryTable", "lean_layout"]

# Positions in the first rotary table; it doubles when a longer request comes. A multiple of pages.
_FIRST_TABLE = 1024


class NotLean(Exception):  # noqa: N818  # not a failure: the module runs instead
    """Why a module cannot run lean."""


class _Norm(NamedTuple):
    """RMSNorm as its module has it. size: numbers that are normalised together."""

    weight: Tensor
    epsilon: Tensor
    size: int


@dataclass(frozen=True)
class LeanLayer:
    """One decoder layer. Norms that a family does not have are None.

    qkv, gate_up          modules whose outputs are computed side by side
    head_norms            of queries and keys: over a head, or over all heads of a token
    has_positions         its queries and keys are rotated
    residual_multiplier   of what attention and MLP add to the stream
    """

    index: int
    qkv: tuple[torch.nn.Module, ...]
    o: torch.nn.Module
    gate_up: tuple[torch.nn.Module, ...]
    down: torch.nn.Module
    activation: Callable[[Tensor], Tensor]
    before_attention: _Norm | None
    after_attention: _Norm | None
    before_mlp: _Norm | None
    after_mlp: _Norm | None
    head_norms: tuple[_Norm, _Norm] | None
    has_positions: bool
    scale: float
    window: int | None
    residual_multiplier: float


@dataclass(frozen=True)
class LeanLayout:
    """What a lean forward is made of: the module's own weights, in the order they are used."""

    family: str
    embedding: Tensor
    embedding_multiplier: float
    layers: tuple[LeanLayer, ...]
    norm: _Norm
    head: torch.nn.Module
    logits_divisor: float
    rotary: torch.nn.Module
    num_query_heads: int
    num_kv_heads: int
    head_size: int

    def groups(self) -> list[tuple[torch.nn.Module, ...]]:
        """Linear layers that are run as one."""
        return [group for layer in self.layers for group in (layer.qkv, layer.gate_up)]


def lean_layout(module: Any, takes_any_dtype: bool = False) -> LeanLayout:
    """Read a module's layout, or raise NotLean with what of it is unknown.

    takes_any_dtype    what is to run it is for float16 and bfloat16 too

    It looks at classes, names and settings; whether the numbers come out the same is for the
    caller to try.
    """
    family = type(module).__name__.removesuffix("ForCausalLM")
    folder = family.lower()
    home = f"transformers.models.{folder}.modeling_{folder}"
    if family not in FAMILIES or type(module).__module__ != home:
        raise NotLean(f"{type(module).__name__} is not among the families that it knows")
    if module.dtype != torch.float32 and not takes_any_dtype:
        raise NotLean(f"it is for float32, and this is {str(module.dtype).removeprefix('torch.')}")
    _require_children("the model", module, {"model", "lm_head"})
    body = module.model
    _require_children("its body", body, {"embed_tokens", "layers", "norm", "rotary_emb"})
    config = module.config
    kind = longest_unstretched_length(config)
    if kind is not None:
        raise NotLean(f"its rotary embedding ({kind[0]}) changes with length")
    known = linear_layers(module)
    for name, part in module.named_modules():
        kind_of_part = type(part)
        is_known = (
            kind_of_part.__module__ in (home, "transformers.activations")
            or kind_of_part in (torch.nn.Embedding, torch.nn.ModuleList)
            or name in known
            or kind_of_part.__module__ == "torch.nn.modules.activation"
        )
        if not is_known or "forward" in vars(part):
            raise NotLean(f"{name or 'the model'} is a {kind_of_part.__name__} of its own")
    layers = tuple(_layer(index, layer, folder, known) for index, layer in enumerate(body.layers))
    attention = body.layers[0].self_attn
    return LeanLayout(
        family=family,
        embedding=body.embed_tokens.weight,
        embedding_multiplier=float(getattr(body, "embedding_multiplier", 1.0)),
        layers=layers,
        norm=_norm(body.norm),
        head=_linear("lm_head", module.lm_head, known),
        logits_divisor=float(config.logits_scaling) if folder == "granite" else 1.0,
        rotary=body.rotary_emb,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=attention.head_dim,
    )


class LeanForward:
    """Runs a layout over flat rows; one engine may run it while another does.

    linears    what runs a group of layers, by the ids of its modules
    """

    def __init__(
        self, layout: LeanLayout, linears: Mapping[tuple[int, ...], Linear], device: torch.device
    ) -> None:
        self.layout = layout
        self._rotary = RotaryTable(layout.rotary, layout.head_size, device)
        self._head = linears[_ids((layout.head,))]
        self._steps = tuple(
            _LayerLinears(
                layer,
                linears[_ids(layer.qkv)],
                linears[_ids((layer.o,))],
                linears[_ids(layer.gate_up)],
                linears[_ids((layer.down,))],
            )
            for layer in layout.layers
        )
        self._int8_step = int8_step(layout, [step[1:] for step in self._steps])
        self._compiled = compiled_layers(layout, [step[1:] for step in self._steps], device)

    @property
    def runs_layers_in_one_call(self) -> bool:
        """Whether there is something quicker for one to four requests with one row each."""
        return self._int8_step is not None

    @property
    def is_compiled_between_products(self) -> bool:
        """Whether numba's loops do what torch would do between the matrix products."""
        return self._compiled is not None

    def __call__(
        self, token_ids: Tensor, batch: BatchView, kv_cache: KVCache, rows: Tensor | None
    ) -> Tensor:
        """Logits of the tokens at `rows`, [len(rows), V].

        token_ids    [T]
        rows         None: all of them, in order
        """
        layout = self.layout
        num_rotated = layout.num_query_heads + layout.num_kv_heads
        num_heads, head_size = num_rotated + layout.num_kv_heads, layout.head_size
        width = layout.num_query_heads * head_size
        hidden = F.embedding(token_ids, layout.embedding)
        if layout.embedding_multiplier != 1.0:
            hidden.mul_(layout.embedding_multiplier)
        cosine, sine = self._rotary(batch)
        if self._int8_step is not None and self._int8_step.takes(batch, len(token_ids)):
            self._int8_step(hidden, cosine, sine, batch, kv_cache)
            hidden = hidden if rows is None else hidden.index_select(0, rows)
            return self._logits(_rms_norm(hidden, layout.norm))
        if self._compiled is not None and self._compiled.takes(batch, len(token_ids)):
            return self._logits(self._compiled(hidden, cosine, sine, batch, kv_cache, rows))
        last = len(self._steps) - 1
        for index, (layer, qkv, o, gate_up, down) in enumerate(self._steps):
            normed = (
                hidden
                if layer.before_attention is None
                else _rms_norm(hidden, layer.before_attention)
            )
            heads = qkv(normed).view(-1, num_heads, head_size)
            query_key = heads[:, :num_rotated]
            if layer.head_norms is not None:
                query_key = _norm_heads(query_key, layer.head_norms, layout.num_query_heads)
            if layer.has_positions:
                turned = torch.roll(query_key, head_size // 2, -1)
                query_key = torch.addcmul(query_key * cosine, turned, sine)
            attended = batch.attend(
                query_key[:, : layout.num_query_heads],
                query_key[:, layout.num_query_heads :],
                heads[:, num_rotated:],
                kv_cache.key[layer.index],
                kv_cache.value[layer.index],
                layer.scale,
                layer.window,
            ).reshape(-1, width)
            if index == last and rows is not None:
                # From here on rows do not meet any more, and the others are not asked for.
                attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
            _add(hidden, o(attended), layer.after_attention, layer.residual_multiplier)
            normed = hidden if layer.before_mlp is None else _rms_norm(hidden, layer.before_mlp)
            gate, up = gate_up(normed).chunk(2, -1)
            mlp = down(layer.activation(gate) * up)
            _add(hidden, mlp, layer.after_mlp, layer.residual_multiplier)
        return self._logits(_rms_norm(hidden, layout.norm))

    def reserve_positions(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Make the rotary tables so long; what is captured in a graph must keep them."""
        return self._rotary.reserve(num_positions)

    def _logits(self, normed: Tensor) -> Tensor:
        logits = self._head(normed)
        if self.layout.logits_divisor != 1.0:
            logits.div_(self.layout.logits_divisor)
        return logits


class _LayerLinears(NamedTuple):
    layer: LeanLayer
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


class RotaryTable:
    """Cosines and sines of positions, as the module's own rotary embedding computes them.

    positions_per_page    made in calls of so many positions, a divisor of 1,024, for those who
                          must not notice how long the table is; None: in one call
    """

    def __init__(
        self,
        rotary: torch.nn.Module,
        head_size: int,
        device: torch.device,
        positions_per_page: int | None = None,
    ) -> None:
        self._rotary = rotary
        self._half = head_size // 2
        self._device = device
        self._page = positions_per_page
        self._tables = self._compute(_FIRST_TABLE)

    def __call__(self, batch: BatchView) -> tuple[Tensor, Tensor]:
        """[T, 1, D] each; the sine of the first half of a head is negative."""
        cosine, sine = self.reserve(batch.max_seq_len)
        return cosine.index_select(0, batch.positions), sine.index_select(0, batch.positions)

    def reserve(self, longest: int) -> tuple[Tensor, Tensor]:
        """The tables, for positions below `longest` and perhaps more."""
        tables = self._tables
        if longest > len(tables[0]):
            length = len(tables[0])
            while length < longest:
                length *= 2
            # In one assignment: another engine may look at the same time.
            self._tables = tables = self._compute(length)
        return tables

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self._device)
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        pages = [
            self._rotary(like, page[None]) for page in torch.split(positions, self._page or length)
        ]
        cosine, sine = (torch.cat(parts, dim=1) for parts in zip(*pages, strict=True))
        signed = sine[0].clone()
        signed[:, : self._half].neg_()
        return cosine[0][:, None].contiguous(), signed[:, None]


def _rms_norm(rows: Tensor, norm: _Norm) -> Tensor:
    """F.rms_norm by fewer calls: the length of a row, and not the mean of its squares."""
    length = torch.linalg.vector_norm(rows, 2, -1, True)
    scale = torch.addcmul(norm.epsilon, length, length, value=1 / norm.size).rsqrt_()
    return (rows * scale).mul_(norm.weight)


def _norm_heads(query_key: Tensor, norms: tuple[_Norm, _Norm], num_query_heads: int) -> Tensor:
    """[T, H + K, D], each head or each of the two sides as a whole."""
    parts = query_key[:, :num_query_heads], query_key[:, num_query_heads:]
    return torch.cat(
        [
            _rms_norm(part.reshape(len(part), -1, norm.size), norm).view(part.shape)
            for part, norm in zip(parts, norms, strict=True)
        ],
        dim=1,
    )


def _add(hidden: Tensor, new: Tensor, norm: _Norm | None, multiplier: float) -> None:
    if norm is not None:
        new = _rms_norm(new, norm)
    hidden.add_(new, alpha=multiplier)


def _layer(index: int, layer: Any, folder: str, known: Mapping[str, torch.nn.Module]) -> LeanLayer:
    where = f"layer {index}"
    norms = ["post_attention_layernorm"]
    norms.append("post_feedforward_layernorm" if folder == "olmo2" else "input_layernorm")
    _require_children(where, layer, {"self_attn", "mlp", *norms})
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = folder in ("qwen3", "olmo2")
    _require_children(
        f"the attention of {where}",
        attention,
        {*LINEARS_OF_ATTENTION, *(("q_norm", "k_norm") if has_head_norms else ())},
    )
    _require_children(f"the MLP of {where}", mlp, {*LINEARS_OF_MLP, "act_fn"})
    q, k, v, o = (_linear(name, getattr(attention, name), known) for name in LINEARS_OF_ATTENTION)
    gate, up, down = (_linear(name, getattr(mlp, name), known) for name in LINEARS_OF_MLP)
    is_silu = type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    is_after = folder == "olmo2"
    first = None if is_after else _norm(layer.input_layernorm)
    second = _norm(layer.post_attention_layernorm)
    if folder == "mistral":
        window = attention.config.sliding_window
    else:
        window = getattr(attention, "sliding_window", None)
    return LeanLayer(
        index=attention.layer_idx,
        qkv=(q, k, v),
        o=o,
        gate_up=(gate, up),
        down=down,
        activation=F.silu if is_silu else mlp.act_fn,
        before_attention=first,
        after_attention=second if is_after else None,
        before_mlp=None if is_after else second,
        after_mlp=_norm(layer.post_feedforward_layernorm) if is_after else None,
        head_norms=((_norm(attention.q_norm), _norm(attention.k_norm)) if has_head_norms else None),
        has_positions=bool(getattr(attention, "use_rope", True)),
        scale=attention.scaling,
        window=window,
        residual_multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _norm(module: Any) -> _Norm:
    if not type(module).__name__.endswith("RMSNorm"):
        raise NotLean(f"it has a {type(module).__name__} where an RMSNorm was expected")
    weight = module.weight
    epsilon = torch.tensor(module.variance_epsilon, dtype=weight.dtype, device=weight.device)
    return _Norm(weight, epsilon, weight.numel())


def _linear(
    name: str, layer: torch.nn.Module, known: Mapping[str, torch.nn.Module]
) -> torch.nn.Module:
    if not any(layer is each for each in known.values()):
        raise NotLean(f"{name} is a {type(layer).__name__} of its own")
    return layer


def _require_children(where: str, module: torch.nn.Module, expected: set[str]) -> None:
    found = {name for name, _ in module.named_children()}
    if found != expected:
        names = ", ".join(sorted(found ^ expected))
        raise NotLean(f"{where} has other parts than it knows ({names})")


def _ids(modules: tuple[torch.nn.Module, ...]) -> tuple[int, ...]:
    return tuple(id(module) for module in modules)
