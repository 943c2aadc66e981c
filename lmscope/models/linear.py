"""LinearMethod: how the matrices of a model are stored and multiplied.

A method turns a weight into a function of rows. `choose_linear_method` says which one a model
gets and why; the rest of lmscope calls the functions and does not know them apart.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lmscope_kernels.half_linear_cpu import (
    half_linear,
    pack_half,
    packed_half_bytes,
    why_no_half_loops,
)
from lmscope_kernels.int8_linear_cpu import MAX_ROWS, Int8Linear, packed_int8_bytes
from lmscope_kernels.numba_support import is_numba_installed, why_not_numba
from torch import Tensor
from torch.nn import functional as F

from lmscope.checks import nearest

__all__ = [
    "GGUF_NAME",
    "ChosenMethod",
    "Fp16PackedLinears",
    "Int8Linears",
    "Linear",
    "LinearMethod",
    "PlainLinears",
    "SideBySideLinears",
    "WeightAndBias",
    "adjoined",
    "biases_of",
    "choose_linear_method",
    "why_no_loops",
]

logger = logging.getLogger(__name__)

# Rows [..., in] -> [..., out].
Linear = Callable[[Tensor], Tensor]

# The quantization of gguf_linears.py.
GGUF_NAME = "gguf"

_FP16_LARGEST = 65504.0
_FP16_SMALLEST_NORMAL = 2.0**-14
# Rounding to half precision is off by at most this part of a normal value, and by at most half
# of 2**-24 for a value below the smallest normal one.
_FP16_ROUNDING = 2.0**-11
_FP16_SMALL_ROUNDING = 2.0**-25
# Numbers looked at together, so that what is made of them stays in the processor's cache.
_CHUNK = 1 << 18


class WeightAndBias(NamedTuple):
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None


class LinearMethod(Protocol):
    """One way to store matrices and to multiply rows by them."""

    @property
    def name(self) -> str: ...

    def refusal(self, weight: Tensor) -> str | None:
        """Why this weight would lose by it; None: it can have it."""
        ...

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        """A function that gives the outputs of all `parts` side by side.

        It may keep a copy of the weights or the weights themselves. Called from several threads.
        """
        ...

    def packed_bytes(self, weight: Tensor) -> int:
        """Bytes that `pack` takes for a weight beside the weight itself."""
        ...


class PlainLinears:
    """torch's F.linear over the module's own weights: exact, without a copy, on any device."""

    name = "F.linear"

    def refusal(self, weight: Tensor) -> str | None:
        return None

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        if len(parts) == 1:
            weight, bias = parts[0]
            return lambda rows: F.linear(rows, weight, bias)
        # One matrix of all parts would be a copy of the weights.
        return lambda rows: torch.cat([F.linear(rows, *part) for part in parts], dim=-1)

    def packed_bytes(self, weight: Tensor) -> int:
        return 0


class SideBySideLinears:
    """F.linear over matrices that lie side by side, so that a group is one product; for a GPU.

    The module's own weights become parts of what is made, so there is no copy of them.
    """

    name = PlainLinears.name

    def refusal(self, weight: Tensor) -> str | None:
        return None

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        weight, bias = adjoined(parts)
        return lambda rows: F.linear(rows, weight, bias)

    def packed_bytes(self, weight: Tensor) -> int:
        return 0


class Fp16PackedLinears:
    """float32 rows times weights in half precision, added up in float32; x86 only.

    Reads half the bytes, and is two to nine times as fast as F.linear for one to sixteen rows.
    By the compiled loops of half_linear_cpu where they can be had, by torch's fbgemm elsewhere,
    which takes more memory, and more time from four rows on.
    """

    name = "fp16-packed"

    def __init__(self, in_loops: bool | None = None) -> None:
        """in_loops: by the compiled loops; None: where they can be had."""
        self.in_loops = why_no_half_loops() is None if in_loops is None else in_loops

    def refusal(self, weight: Tensor) -> str | None:
        """Why the weight would lose more than rounding by 2**-11 does.

        Every value must be finite and at most 65,504. A value from 2**-14 on keeps eleven bits,
        so it is off by 2**-11 of itself at most. What is smaller is off by up to 2**-25, and all
        of that together must be at most 2**-11 of the matrix, in the Frobenius norm.
        """
        flat = weight.detach().reshape(-1)
        # Usual weights lose nothing even if all of them were small. Twice as much is asked for
        # as that takes: a sum of so many squares in float32 may be off by half of itself.
        norm = float(torch.linalg.vector_norm(flat))
        enough = 2 * flat.numel() ** 0.5 * _FP16_SMALL_ROUNDING / _FP16_ROUNDING
        if norm >= enough and _largest(flat) <= _FP16_LARGEST:
            return None
        largest = squares = 0.0
        num_small = 0
        for chunk in torch.split(flat, _CHUNK):
            largest = max(largest, _largest(chunk))
            squares += float(torch.dot(chunk, chunk))
            normal = F.hardshrink(chunk, _FP16_SMALLEST_NORMAL)
            num_small += int(chunk.count_nonzero() - normal.count_nonzero())
        if math.isnan(squares):
            return "a weight is not a number"
        if largest > _FP16_LARGEST:
            return f"a weight of {largest:g} is more than float16 holds ({_FP16_LARGEST:g})"
        if num_small**0.5 * _FP16_SMALL_ROUNDING > _FP16_ROUNDING * squares**0.5:
            return (
                f"{num_small} of {flat.numel()} weights are below {_FP16_SMALLEST_NORMAL:g}, "
                "where float16 keeps few bits"
            )
        return None

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        weight, bias = _side_by_side(parts)
        if self.in_loops:
            tiles = pack_half(weight, bias)
            num_inputs = weight.shape[1]
            return lambda rows: half_linear(rows.reshape(-1, num_inputs), tiles).view(
                *rows.shape[:-1], tiles.shape[0]
            )
        ops = torch.ops.quantized
        packed = ops.linear_prepack_fp16.default(weight.contiguous(), bias)
        multiply: Any = ops.linear_dynamic_fp16.default
        return lambda rows: multiply(rows, packed)

    def packed_bytes(self, weight: Tensor) -> int:
        num_outputs, num_inputs = weight.shape
        if self.in_loops:
            return packed_half_bytes(num_outputs, num_inputs)
        # fbgemm fills them up to whole blocks of 16 outputs and 512 inputs.
        return 2 * math.ceil(num_outputs / 16) * 16 * math.ceil(num_inputs / 512) * 512


class Int8Linears:
    """float32 rows times weights of 8 bits, each output with a scale of its own; approximate.

    For one to four rows. More are multiplied by the same weights, in half precision where there
    are loops for it.
    """

    name = "int8"

    def refusal(self, weight: Tensor) -> str | None:
        return None if bool(weight.isfinite().all()) else "a weight is not a finite number"

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        return Int8Linear(*_side_by_side(parts))

    def packed_bytes(self, weight: Tensor) -> int:
        return packed_int8_bytes(*weight.shape)


class ChosenMethod(NamedTuple):
    """A method, and why it is this one.

    warning    what runs instead of what could be expected, and what to do; "": nothing does
    """

    method: LinearMethod
    why: str
    warning: str = ""

    def warn(self) -> None:
        if self.warning:
            logger.warning("%s", self.warning)


def choose_linear_method(
    *, exact: bool, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> ChosenMethod:
    """The method for a model.

    exact           the numbers of F.linear in the model's dtype
    quantization    what the user asked for; None: nothing that changes more than rounding does.
                    GGUF_NAME is for choose_gguf_method, which knows the model

    ValueError when what the user asked for cannot be had.
    """
    if quantization is not None:
        if quantization != Int8Linears.name:
            known = (Int8Linears.name, GGUF_NAME)
            raise ValueError(f"quantization is {quantization!r}; {nearest(quantization, known)}")
        reason = why_no_loops(dtype, device)
        if reason is not None:
            raise ValueError(f"quantization is 'int8', which {reason}, or leave quantization out")
        reason = why_no_half_loops()
        more = "half precision" if reason is None else f"float32, since {reason},"
        return ChosenMethod(
            Int8Linears(),
            f"quantization='int8', approximate; {more} for more than {MAX_ROWS} rows",
            ""
            if reason is None
            else f"quantization is 'int8', and {reason}: steps of more than "
            f"{MAX_ROWS} rows turn all weights back into float32, which is slow; leave "
            "quantization out for such steps",
        )
    if device.type == "cuda":
        return ChosenMethod(SideBySideLinears(), f"on {device}, in the dtype of the weights")
    if exact:
        return ChosenMethod(PlainLinears(), "exact=True")
    reason = _why_not_fp16(dtype, device)
    if reason is not None:
        return ChosenMethod(PlainLinears(), reason, _warning(reason, dtype, device))
    warning = ""
    if is_numba_installed() and why_not_numba() is not None:
        warning = f"{why_not_numba()}, so torch computes what loops would, slower; reinstall numba"
    method = Fp16PackedLinears()
    how = "by compiled loops" if method.in_loops else f"by torch, since {why_no_half_loops()}"
    return ChosenMethod(
        method, f"float32 on an x86 CPU, {how}; exact=True keeps float32 weights", warning
    )


def adjoined(parts: Sequence[WeightAndBias]) -> WeightAndBias:
    """One weight and bias that give the outputs of all parts, whose weights become parts of it."""
    weight = _adjoining([part.weight for part in parts])
    if weight is None:
        # In nobody's inference mode: the weights must tell when they are written to.
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.cat([part.weight for part in parts])
            start = 0
            for part in parts:
                end = start + len(part.weight)
                part.weight.data = weight[start:end]
                start = end
    return WeightAndBias(weight, biases_of(parts))


def why_no_loops(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the compiled loops of small weights cannot be had, and what to do; None: they can."""
    if device.type != "cpu":
        return f"is for a CPU, and this is {device.type}; use device='cpu'"
    if dtype != torch.float32:
        return f"takes float32, and this is {_name(dtype)}; use dtype='float32'"
    reason = why_not_numba()
    return None if reason is None else f"needs the extra cpu: {reason}"


def _why_not_fp16(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why packed weights cannot be had here; None: they can."""
    if device.type != "cpu":
        return f"packed weights are for a CPU, and this is {device.type}"
    if dtype != torch.float32:
        return f"packed weights take rows in float32, and these are {_name(dtype)}"
    if not _is_x86():
        machine = platform.machine().lower() or "unknown"
        return f"packed weights need an x86 CPU, and this is {machine}"
    if why_no_half_loops() is None:
        return None
    for name in ("linear_prepack_fp16", "linear_dynamic_fp16"):
        if not hasattr(torch.ops.quantized, name):
            return f"this build of torch has no quantized.{name}"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch has no fbgemm"
    return None


def _warning(reason: str, dtype: torch.dtype, device: torch.device) -> str:
    """What to say of F.linear where packed weights could be expected; "" where they could not."""
    if device.type != "cpu" or not _is_x86():
        return ""
    slow = (
        f"matrices are multiplied by F.linear, several times slower than packed weights: {reason}"
    )
    if dtype != torch.float32:
        return f"{slow}; use dtype='float32'"
    return f"{slow}, and {why_no_half_loops()}"


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _adjoining(weights: Sequence[Tensor]) -> Tensor | None:
    """One matrix of all of these where they lie one behind the other in memory already."""
    first = weights[0]
    place = first.data_ptr()
    for weight in weights:
        if not weight.is_contiguous() or weight.data_ptr() != place:
            return None
        if weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += weight.numel() * weight.element_size()
    num_rows = sum(len(weight) for weight in weights)
    return first.detach().as_strided((num_rows, first.shape[1]), (first.shape[1], 1))


def _largest(numbers: Tensor) -> float:
    """The largest size of a number; NaN where one is not a number."""
    lowest, highest = torch.aminmax(numbers)
    return max(-float(lowest), float(highest))


def _side_by_side(parts: Sequence[WeightAndBias]) -> WeightAndBias:
    """One weight and bias that give the outputs of all parts."""
    if len(parts) == 1:
        return parts[0]
    return WeightAndBias(torch.cat([part.weight for part in parts]), biases_of(parts))


def biases_of(parts: Sequence[WeightAndBias]) -> Tensor | None:
    """The biases of all parts, in a copy where there are several; None where there are none."""
    if len(parts) == 1:
        return parts[0].bias
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [
            part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
            for part in parts
        ]
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
