"""PackedLinears: the linear layers of a module, as one LinearMethod stores them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from lmscope.models.early_packing import EarlyPacking
from lmscope.models.linear import ChosenMethod, Linear, PlainLinears, WeightAndBias
from lmscope.models.plan import PlanLine
from lmscope.models.swap import make_swappable, weight_and_bias

__all__ = ["PackedLinears"]

_MAX_PACKING_THREADS = 4


class PackedLinears:
    """What runs the layers of a module; the module's own linear layers become swappable.

    groups    what runs a group of layers, by the ids of its modules
    layers    what runs one layer, by its id; a member of a group runs all of it
    are_weights_unread    nothing has read the module's own weights, which are in a mapped file
    """

    def __init__(
        self,
        chosen: ChosenMethod,
        layers: dict[str, torch.nn.Module],
        groups: Sequence[tuple[torch.nn.Module, ...]],
        early: EarlyPacking | None = None,
    ) -> None:
        """Pack each of `groups` as one, and the other `layers` one by one.

        early    what was packed while the module was loaded, by the same method
        """
        self._chosen = chosen
        self._early = early
        self._plain = PlainLinears()
        grouped = {id(layer) for group in groups for layer in group}
        # The largest first, so that no thread is left with it at the end.
        todo = [*groups, *((each,) for each in layers.values() if id(each) not in grouped)]
        todo.sort(key=lambda group: -sum(weight_and_bias(each).weight.numel() for each in group))
        with ThreadPoolExecutor(_num_packing_threads()) as pool:
            done = list(pool.map(self._pack, todo))
        self.are_weights_unread = early is not None and all(each.is_early for each in done)
        self._early = None
        self.groups: dict[tuple[int, ...], Linear] = {}
        self.layers: dict[int, Linear] = {}
        self.refused: dict[int, str] = {}
        self.num_bytes = 0
        for group, (linear, refusal, _) in zip(todo, done, strict=True):
            self.groups[tuple(id(layer) for layer in group)] = linear
            if refusal is not None:
                self.refused.update((id(layer), refusal) for layer in group)
                continue
            if chosen.method.name == self._plain.name:
                continue
            start = 0
            for layer in group:
                weight = weight_and_bias(layer).weight
                self.num_bytes += chosen.method.packed_bytes(weight)
                end = start + len(weight)
                self.layers[id(layer)] = linear if len(group) == 1 else _part(linear, start, end)
                start = end
                make_swappable(layer)
        self._names = {id(layer): name for name, layer in layers.items()}

    def line(self, is_changed: bool) -> PlanLine:
        """Of all linear layers together."""
        method, why = self._chosen.method, self._chosen.why
        if is_changed:
            return PlanLine(self._plain.name, "llm.module was changed after it was loaded")
        if not self.refused:
            return PlanLine(method.name, why)
        layer_id, refusal = next(iter(self.refused.items()))
        num_packed, num_all = len(self._names) - len(self.refused), len(self._names)
        return PlanLine(
            f"{method.name} in {num_packed} of {num_all} layers, {self._plain.name} in the others",
            f"{why}; {self._names[layer_id]}: {refusal}",
        )

    def head_line(self, module: Any, is_changed: bool) -> PlanLine:
        """Of the matrix that gives the logits."""
        head = module.get_output_embeddings()
        is_packed = id(head) in self.layers and not is_changed
        name = self._chosen.method.name if is_packed else self._plain.name
        is_tied = head is not None and head.weight is module.get_input_embeddings().weight
        return PlanLine(
            name + (", tied to the embedding" if is_tied else ""),
            self.refused.get(id(head), ""),
        )

    def _pack(self, group: tuple[torch.nn.Module, ...]) -> _Done:
        parts: list[WeightAndBias] = [weight_and_bias(layer) for layer in group]
        if self._early is not None:
            done = self._early.take(parts)
            if done is not None:
                linear = done.linear or self._plain.pack(parts)
                return _Done(linear, done.refusal, is_early=done.linear is not None)
        with torch.inference_mode():
            for part in parts:
                refusal = self._chosen.method.refusal(part.weight)
                if refusal is not None:
                    return _Done(self._plain.pack(parts), refusal)
            return _Done(self._chosen.method.pack(parts), None)


class _Done(NamedTuple):
    """What runs a group, and why its method does not."""

    linear: Linear
    refusal: str | None
    is_early: bool = False


def _part(linear: Linear, start: int, end: int) -> Linear:
    return lambda rows: linear(rows)[..., start:end]


def _num_packing_threads() -> int:
    return min(os.cpu_count() or 1, _MAX_PACKING_THREADS)
