"""Runs a module's linear layers by other means, for one thread and one forward at a time.

The module stays what it is: its weights, hooks and names. Only the class of its linear layers
is another, which asks, in the thread that runs it, whether there is a packed weight for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lmscope.models.linear import Linear, WeightAndBias

__all__ = ["linear_layers", "make_swappable", "swapped_linears", "weight_and_bias"]


class _Swapped(threading.local):
    """id of a layer -> what runs in its place, in this thread."""

    linears: Mapping[int, Linear] = MappingProxyType({})


_swapped = _Swapped()


class _SwappableLinear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        linear = _swapped.linears.get(id(self))
        return F.linear(input, self.weight, self.bias) if linear is None else linear(input)

    def _get_name(self) -> str:
        return "Linear"


class _SwappableConv1D(Conv1D):  # type: ignore[misc]  # transformers gives it no type
    def forward(self, x: Tensor) -> Tensor:
        linear = _swapped.linears.get(id(self))
        if linear is None:
            output: Tensor = super().forward(x)
            return output
        return linear(x)

    def _get_name(self) -> str:
        return "Conv1D"


def linear_layers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers that can be run by other means, by name. Subclasses do more, so are not among
    them."""
    kinds = (torch.nn.Linear, Conv1D, _SwappableLinear, _SwappableConv1D)
    return {name: layer for name, layer in module.named_modules() if type(layer) in kinds}


def weight_and_bias(layer: torch.nn.Module) -> WeightAndBias:
    """Those of a layer from linear_layers, as F.linear takes them."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return WeightAndBias(weight.t() if isinstance(layer, Conv1D) else weight, bias)


def make_swappable(layer: torch.nn.Module) -> None:
    """Let swapped_linears reach a layer from linear_layers; it computes what it did before."""
    layer.__class__ = _SwappableConv1D if isinstance(layer, Conv1D) else _SwappableLinear


@contextmanager
def swapped_linears(linears: Mapping[int, Linear]) -> Iterator[None]:
    """Inside, in this thread, layers with these ids run so."""
    before, _swapped.linears = _swapped.linears, linears
    try:
        yield
    finally:
        _swapped.linears = before
