"""The batch-invariant forward: a row has the same bits alone and in any batch.

Every operation on a row is one whose bits depend on that row alone. Of torch's on a CPU these are

    products     calls of a few fixed numbers of rows, each tried against the others on this
                 machine; what is left over is filled up with rows of zeros
    attention    lmscope_kernels.invariant_attention
    norms        the length of each row, then single additions, products, roots and divisions,
                 which IEEE 754 rounds one way
    rotation     the same; its cosines are made in pages of fixed size
    SiLU         rows in strides: the exponential differs between vector instructions and what is
                 left at the end of a buffer, so every row must be a buffer to itself

docs/decisions/batch_invariant.md says what was tried. The LeanForward is the quicker one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from lmscope_kernels.decode_attention_cpu import DecodeKernelChoice
from lmscope_kernels.invariant_attention import InvariantRows
from torch import Tensor
from torch.nn import functional as F

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.fuse import LeanForward, LeanLayout, NotLean, RotaryTable
from lmscope.models.linear import (
    ChosenMethod,
    Linear,
    LinearMethod,
    PlainLinears,
    WeightAndBias,
)

__all__ = ["InvariantForward", "InvariantLinears", "invariant_method"]

logger = logging.getLogger(__name__)

# Rows of a call that are tried, each against _BASE. F.linear goes over four rows at a time and
# torch's packed weights over six; on one thread or several, and on another processor, others of
# these give the same bits. With the loops of half_linear_cpu all of them do.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 18, 24, 36, 48, 96, 192)
_BASE = 12
# Of a matrix with more numbers, larger calls are not tried, for the time that it takes.
_LARGE_MATRIX = 1 << 23
_LARGEST_OF_LARGE = 48
# One call with so many rows too many is cheaper than two calls; so is one with a third too many.
_FEW_ROWS = 3
_ALIGNMENT = 64
# From so many numbers on, torch divides an elementwise operation between threads, in the middle
# of a row.
_MOST_ELEMENTS = 32767
# Cosines of a long table may have other bits in the same place than those of a short one.
POSITIONS_PER_PAGE = 128


def invariant_method(chosen: ChosenMethod) -> ChosenMethod:
    """The same weights, multiplied so that a row does not notice the others."""
    return ChosenMethod(
        InvariantLinears(chosen.method),
        "batch_invariant=True, calls of fixed numbers of rows, each tried on this machine; "
        + chosen.why,
        chosen.warning,
    )


class InvariantLinears:
    """Another method's matrices, in calls of a few fixed numbers of rows."""

    def __init__(self, method: LinearMethod) -> None:
        self._method = method
        self._plain = PlainLinears()
        self._sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._refused: set[int] = set()  # addresses of weights

    @property
    def name(self) -> str:
        return f"{self._method.name}, batch-invariant"

    def refusal(self, weight: Tensor) -> str | None:
        """None: what the other method refuses is multiplied by F.linear, in fixed calls too."""
        return None

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        own = [_aligned_part(part) for part in parts]
        method = self._method
        if any(method.refusal(part.weight) is not None for part in own):
            method = self._plain
            self._refused.update(part.weight.data_ptr() for part in parts)
        key = (method.name, *((part.weight.shape, part.bias is None) for part in own))
        return _InvariantLinear(
            method.pack(own),
            num_in=own[0].weight.shape[1],
            num_weights=sum(part.weight.numel() for part in own),
            key=key,
            known=self._sizes,
        )

    def packed_bytes(self, weight: Tensor) -> int:
        if self._method.name != self._plain.name and weight.data_ptr() not in self._refused:
            return self._method.packed_bytes(weight)
        return 0 if _is_aligned(weight) else weight.numel() * weight.element_size()


class _InvariantLinear:
    """One matrix.

    key      what the sizes of its calls depend on, beside the number of threads
    known    sizes by key and threads, shared by the matrices of a model
    """

    def __init__(
        self,
        linear: Linear,
        *,
        num_in: int,
        num_weights: int,
        key: tuple[object, ...],
        known: dict[tuple[object, ...], tuple[int, ...]],
    ) -> None:
        self._linear = linear
        self._num_in = num_in
        self._largest = _SIZES[-1] if num_weights <= _LARGE_MATRIX else _LARGEST_OF_LARGE
        self._key = key
        self._known = known

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        shape, rows = rows.shape, rows.reshape(-1, self._num_in)
        key = (*self._key, torch.get_num_threads())
        sizes = self._known.get(key)
        if sizes is None:
            sizes = self._known[key] = self._try_sizes()
        results: list[Tensor] = []
        start, num_left = 0, len(rows)
        while num_left or not results:
            size = _next_size(sizes, num_left)
            own = rows[start : start + size]
            if len(own) < size:
                own = rows.new_zeros(size, self._num_in)
                own[:num_left] = rows[start:]
            results.append(self._linear(_aligned(own))[:num_left])
            start, num_left = start + size, max(num_left - size, 0)
        output = results[0] if len(results) == 1 else torch.cat(results)
        return output.view(*shape[:-1], output.shape[-1])

    def _try_sizes(self) -> tuple[int, ...]:
        """Sizes of calls that give a row the same bits, in any place of a call; ascending."""
        random = torch.Generator().manual_seed(0)
        rows = torch.randn(self._largest, self._num_in, generator=random)

        def run(size: int, rows: Tensor) -> Tensor:
            return torch.cat([self._linear(_aligned(each)) for each in torch.split(rows, size)])

        wanted = run(_BASE, rows)

        def is_same(size: int) -> bool:
            num_rows = -(-_BASE // size) * size
            places = torch.randperm(len(rows), generator=random)[:num_rows]
            return torch.equal(run(size, rows[places]), wanted[places])

        good = tuple(size for size in _SIZES if size <= self._largest and is_same(size))
        if _BASE in good:
            return good
        logger.warning(
            "a row of a product %s has other bits in another place of a call of %d rows, so "
            "batch_invariant=True multiplies one row at a time here, which is slow",
            self._key,
            _BASE,
        )
        return (1,)


def _next_size(sizes: Sequence[int], num_left: int) -> int:
    """Rows of the next call. More than are left: the others are filled up with zeros."""
    enough = next((size for size in sizes if size >= num_left), None)
    smaller = [size for size in sizes if size <= num_left]
    if enough is not None and (not smaller or enough - num_left <= max(_FEW_ROWS, num_left // 3)):
        return enough
    return smaller[-1]


class InvariantForward(LeanForward):
    """Runs a layout so that a row has the same bits alone and in any batch.

    linears    those of InvariantLinears, by the ids of their modules
    kernel     what attends, for as long as the engine lives
    """

    def __init__(
        self,
        layout: LeanLayout,
        linears: Mapping[tuple[int, ...], Linear],
        device: torch.device,
        kernel: DecodeKernelChoice,
    ) -> None:
        if device.type != "cpu":
            raise NotLean(f"the invariant forward is for a CPU, and this is {device.type}")
        if any(layer.activation is not F.silu for layer in layout.layers):
            raise NotLean("its activation is not SiLU")
        super().__init__(layout, linears, device)
        self._rotary = RotaryTable(
            layout.rotary, layout.head_size, device, positions_per_page=POSITIONS_PER_PAGE
        )
        self._kernel = kernel.name

    @property
    def runs_layers_in_one_call(self) -> bool:
        return False

    @property
    def is_compiled_between_products(self) -> bool:
        return False

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
        half, width = head_size // 2, layout.num_query_heads * head_size
        num_tokens = batch.num_tokens
        hidden = F.embedding(token_ids[:num_tokens], layout.embedding)
        if layout.embedding_multiplier != 1.0:
            hidden.mul_(layout.embedding_multiplier)
        cosine, sine = (table[:num_tokens] for table in self._rotary(batch))
        attention = _rows_of(batch, kv_cache.key[0].shape[1], self._kernel)
        slots = batch.slot_mapping[:num_tokens]
        last = len(self._steps) - 1
        for index, (layer, qkv, o, gate_up, down) in enumerate(self._steps):
            before, after = layer.before_attention, layer.after_attention
            normed = hidden if before is None else _rms_norm(hidden, before)
            heads = qkv(normed).view(-1, num_heads, head_size)
            query, key = heads[:, : layout.num_query_heads], heads[:, layout.num_query_heads :]
            key, value = key.chunk(2, 1)
            if layer.head_norms is not None:
                query, key = (
                    _rms_norm(part.reshape(len(part), -1, norm.size), norm).view(part.shape)
                    for part, norm in zip((query, key), layer.head_norms, strict=True)
                )
            if layer.has_positions:
                # Two steps: a product and a sum in one would be rounded once, where they are.
                query, key = (
                    (part * cosine).add_(torch.roll(part, half, -1).mul_(sine))
                    for part in (query, key)
                )
            key_cache, value_cache = kv_cache.key[layer.index], kv_cache.value[layer.index]
            key_cache.flatten(0, 1).index_copy_(0, slots, key)
            value_cache.flatten(0, 1).index_copy_(0, slots, value)
            attended = attention.attend(query, key_cache, value_cache, layer.scale, layer.window)
            if batch.mass is not None:
                batch.mass.add(query, key_cache, layer.scale, layer.window, None)
            attended = attended.view(-1, width)
            if index == last and rows is not None:
                # From here on rows do not meet any more, and the others are not asked for.
                attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
            _add(hidden, o(attended), after, layer.residual_multiplier)
            normed = hidden if layer.before_mlp is None else _rms_norm(hidden, layer.before_mlp)
            mlp = down(_silu_mul(gate_up(normed)))
            _add(hidden, mlp, layer.after_mlp, layer.residual_multiplier)
        logits = self._head(_rms_norm(hidden, layout.norm))
        return logits.div_(layout.logits_divisor) if layout.logits_divisor != 1.0 else logits


def _rows_of(batch: BatchView, block_size: int, kernel: str) -> InvariantRows:
    """Each row of a batch with the request that it belongs to."""
    starts = batch.query_start_loc[: batch.num_reqs + 1].numpy()
    return InvariantRows(
        np.repeat(np.arange(batch.num_reqs), np.diff(starts)),
        batch.positions[: batch.num_tokens].numpy(),
        batch.block_table.numpy(),
        block_size,
        kernel,
    )


def _rms_norm(rows: Tensor, norm: tuple[Tensor, Tensor, int]) -> Tensor:
    weight, epsilon, size = norm
    length = torch.linalg.vector_norm(rows, 2, -1, True)
    # The root and the quotient are rounded correctly; an instruction for both is not.
    root = length.square_().div_(size).add_(epsilon).sqrt_()
    normed: Tensor = (rows / root).mul_(weight)
    return normed


def _silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2I] -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    num_rows, size = gate.shape
    result = torch.empty(gate.shape)
    num_at_once = max(1, _MOST_ELEMENTS // size)
    for start in range(0, num_rows, num_at_once):
        rows = slice(start, start + num_at_once)
        # The gate is every other half of a buffer, so torch goes over it row by row.
        torch.ops.aten.silu.out(gate[rows], out=result[rows])
    return result.mul_(up)


def _add(
    hidden: Tensor, new: Tensor, norm: tuple[Tensor, Tensor, int] | None, multiplier: float
) -> None:
    if norm is not None:
        new = _rms_norm(new, norm)
    # With a factor in the addition, both would be rounded at once, or each, as it falls.
    hidden.add_(new if multiplier == 1.0 else new * multiplier)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0 and tensor.is_contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that begins where torch's own memory does."""
    return tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _aligned_part(part: WeightAndBias) -> WeightAndBias:
    return WeightAndBias(_aligned(part.weight), part.bias)
