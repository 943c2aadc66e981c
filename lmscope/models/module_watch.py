"""ModuleWatch: whether somebody listens inside a module, or changed it, since it was loaded."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules import module as torch_module

__all__ = ["ModuleWatch"]

# Numbers of a module that the lean forward reads once.
_LEAN_SETTINGS = frozenset(
    {"embedding_multiplier", "residual_multiplier", "scaling", "variance_epsilon"}
)


class ModuleWatch:
    """Tells whether a module was touched: listened to, or changed. Some 50 us for 30 layers.

    is_lean    what the lean forward keeps of the module counts too: settings, and buffers, which
               some of the other modules replace in each forward
    """

    def __init__(self, module: torch.nn.Module, *, is_lean: bool) -> None:
        modules = list(module.modules())
        self._hooks: list[Any] = [
            hooks
            for each in modules
            for hooks in (
                each._forward_hooks,
                each._forward_pre_hooks,
            )
        ]
        self._hooks += [
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
        ]
        self._attributes = [vars(each) for each in modules]
        self._num_overridden = self._overridden()
        self._kinds = list({type(each) for each in modules})
        self._forwards = self._current_forwards()
        self._places: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._known: list[Any] = []
        for each in modules:
            settings = vars(each).keys() & _LEAN_SETTINGS if is_lean else ()
            for place, names in (
                (each._modules, each._modules),
                (each._parameters, each._parameters),
                (each._buffers, each._buffers if is_lean else ()),
                (vars(each), settings),
            ):
                for name in names:
                    self._places.append(place)
                    self._names.append(name)
                    self._known.append(place[name])
        self._parameters = [each for each in self._known if isinstance(each, Tensor)]
        self._versions = self._current_versions()
        self._addresses = self._current_addresses()
        # Where some numbers of the weights lie, and what they were.
        self._samples: tuple[list[NDArray[Any]], list[bytes]] = [], []
        self._is_rewritten = False

    def sample_weights(self) -> None:
        """Remember a number of each weight, from which `look_into_weights` tells that it changed.

        Reading them takes weights that are in a mapped file into memory, so it must come before
        somebody can write to them, and best no earlier. On any thread; again, nothing happens.
        """
        if not self._samples[0]:
            places = [_middle(each) for each in self._parameters if _can_be_sampled(each)]
            self._samples = places, _numbers_at(places)

    def is_listened_to(self) -> bool:
        return (
            any(self._hooks)
            or self._overridden() != self._num_overridden
            or not all(map(operator.is_, self._current_forwards(), self._forwards))
        )

    def is_changed(self) -> bool:
        """A weight was written to or replaced, or a part of the module was."""
        current = map(dict.get, self._places, self._names)
        return (
            self._is_rewritten
            or not all(map(operator.is_, current, self._known))
            or self._current_versions() != self._versions
        )

    def look_into_weights(self) -> None:
        """Find what was written through `.data`, which torch does not count; on a CPU.

        What was put in the place of a weight shows by its address, and what was written into one by
        the number in its middle, if those were sampled. It takes as long as all else here, so only
        prompts wait for it.
        """
        places, numbers = self._samples
        self._is_rewritten = (
            self._is_rewritten
            or self._current_addresses() != self._addresses
            or _numbers_at(places) != numbers
        )

    def _overridden(self) -> int:
        """Modules whose forward is another than that of their class."""
        return sum(map(operator.contains, self._attributes, repeat("forward")))

    def _current_forwards(self) -> list[Any]:
        return list(map(operator.attrgetter("forward"), self._kinds))

    def _current_versions(self) -> list[int]:
        return list(map(operator.attrgetter("_version"), self._parameters))

    def _current_addresses(self) -> list[int]:
        # On a GPU, other engines lay the same weights side by side.
        return [each.data_ptr() for each in self._parameters if each.device.type == "cpu"]


def _can_be_sampled(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.numel() > 0


def _numbers_at(places: list[NDArray[Any]]) -> list[bytes]:
    return list(map(np.ndarray.tobytes, places))


def _middle(parameter: Tensor) -> NDArray[Any]:
    """The bits of one number, in the parameter's own memory."""
    middle = parameter.numel() // 2
    one: NDArray[Any] = parameter.detach().view(-1)[middle : middle + 1].view(torch.uint8).numpy()
    return one
