"""Packs the weights of a model while the model is still loaded.

Importing what makes a module takes longer than packing the weights of a small model, and keeps
one core busy; packing wants no part of it, only the file that the weights are in. So threads read
that file as soon as it is known, and pack what they guess that the model will multiply by. What was
packed is given out only for parameters that show the very place in the file which it was read from,
mapped into memory, and that nobody has written to. A wrong guess costs time and changes nothing.

Read so, the weights themselves are not looked at through the mapping, and take no memory until
somebody looks into the module.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope.models.lean_names import FAMILIES, LINEARS_OF_ATTENTION, LINEARS_OF_MLP
from lmscope.models.linear import ChosenMethod, Fp16PackedLinears, Linear, WeightAndBias
from lmscope.torch_threads import one_torch_thread

__all__ = ["EarlyPacking", "PackedEarly", "begin_packing"]

_MAPS = Path("/proc/self/maps")
_MAX_THREADS = 4
_ITEM_BYTES = 4  # of float32


class PackedEarly(NamedTuple):
    """linear: of a group of layers; None where it was refused, and then why."""

    linear: Linear | None
    refusal: str | None


class _Stored(NamedTuple):
    """A float32 tensor in a file. start: in bytes from the beginning of the file."""

    start: int
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)


class _Part(NamedTuple):
    """A linear layer in a file."""

    weight: _Stored
    bias: _Stored | None


_Group = tuple[_Part, ...]


class _Mapping(NamedTuple):
    """Addresses from `start` to `end` show a file from `offset` on."""

    start: int
    end: int
    offset: int


def begin_packing(folder: Path, chosen: ChosenMethod) -> EarlyPacking | None:
    """Start on the model in a folder; None where it can only be packed once it is loaded.

    It can be started on where the method is worth it, the model is shaped like Llama, its weights
    are float32 in one file, and the system tells which files are mapped.
    """
    file = folder / "model.safetensors"
    if not isinstance(chosen.method, Fp16PackedLinears) or not _MAPS.exists():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        groups = _groups(config, _float32_tensors(file))
        return EarlyPacking(file, groups, chosen) if groups else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        return None  # what is wrong with these files is said when they are loaded


class EarlyPacking:
    """Threads that pack groups of layers out of one file. Close it, or nothing is let go of."""

    def __init__(self, file: Path, groups: Sequence[_Group], chosen: ChosenMethod) -> None:
        self._path = os.path.realpath(file)
        self._state = _state(self._path)
        self.chosen = chosen
        # The largest first, so that no thread is left with it at the end.
        order = sorted(groups, key=_num_items, reverse=True)
        self._largest = _num_items(order[0])
        self._futures: dict[_Group, Future[PackedEarly]] = {group: Future() for group in order}
        self._todo = deque(self._futures.items())
        num_threads = max(1, min((os.cpu_count() or 1) - 1, _MAX_THREADS))
        self._threads = [
            threading.Thread(target=self._run, name=f"lmscope-packing-{number}")
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, parts: Sequence[WeightAndBias]) -> PackedEarly | None:
        """What was packed of these parameters, as soon as it is; None: pack them.

        Only after the module is loaded. What is taken is not kept here.
        """
        group = self._where(parts)
        future = None if group is None else self._futures.pop(group, None)
        if future is None:
            return None
        self._run()  # rather than wait while there is something to do
        try:
            return future.result()
        except (OSError, RuntimeError, MemoryError):
            return None  # packing them again meets the same trouble, and says so

    def close(self) -> None:
        """Stop packing, and let go of what was not taken."""
        self._todo.clear()
        for thread in self._threads:
            thread.join()
        self._futures.clear()

    def _run(self) -> None:
        with one_torch_thread():
            self._pack_all()

    def _pack_all(self) -> None:
        """Work off what there is; an error goes to those who wait for it."""
        work = self._next()
        if work is None:
            return
        try:
            numbers = np.empty(self._largest, dtype=np.float32)
            with open(self._path, "rb", buffering=0) as file, torch.inference_mode():
                while work is not None:
                    group, future = work
                    future.set_result(self._pack(group, file, numbers))
                    work = self._next()
        except Exception as error:
            while work is not None:
                work[1].set_exception(error)
                work = self._next()

    def _next(self) -> tuple[_Group, Future[PackedEarly]] | None:
        try:
            return self._todo.popleft()
        except IndexError:
            return None

    def _pack(self, group: _Group, file: RawIOBase, numbers: NDArray[np.float32]) -> PackedEarly:
        """One group; its weights are read into `numbers`, one behind the other."""
        start = 0
        for part in group:
            _read(file, part.weight, numbers[start : start + part.weight.num_items])
            start += part.weight.num_items
        together = torch.from_numpy(numbers[:start]).view(-1, group[0].weight.shape[1])
        for weight in torch.split(together, [part.weight.shape[0] for part in group]):
            refusal = self.chosen.method.refusal(weight)
            if refusal is not None:
                return PackedEarly(None, refusal)
        biases = _read_biases(file, group)
        return PackedEarly(self.chosen.method.pack([WeightAndBias(together, biases)]), None)

    def _where(self, parts: Sequence[WeightAndBias]) -> _Group | None:
        """The places in the file that parameters show; None unless all of them do."""
        found = []
        for weight, bias in parts:
            stored = self._place(weight)
            stored_bias = None if bias is None else self._place(bias)
            if stored is None or (bias is not None and stored_bias is None):
                return None
            found.append(_Part(stored, stored_bias))
        return tuple(found)

    def _place(self, parameter: Tensor) -> _Stored | None:
        if (
            parameter.dtype != torch.float32
            or parameter.device.type != "cpu"
            or not parameter.is_contiguous()
            or parameter._version != 0  # written to since it was made
        ):
            return None
        start = parameter.data_ptr()
        for mapping in self._mappings:
            if mapping.start <= start and start + parameter.nbytes <= mapping.end:
                return _Stored(start - mapping.start + mapping.offset, tuple(parameter.shape))
        return None

    @cached_property
    def _mappings(self) -> list[_Mapping]:
        """Of the file that is packed; none if another one has taken its place."""
        found = []
        for line in _MAPS.read_text(errors="replace").splitlines():
            # "start-end permissions offset device inode path"; the path of a file that was
            # replaced ends in " (deleted)", so it is another.
            addresses, _, offset, _, _, *path = line.split(maxsplit=5)
            if path == [self._path]:
                start, end = (int(each, 16) for each in addresses.split("-"))
                found.append(_Mapping(start, end, int(offset, 16)))
        return found if _state(self._path) == self._state else []


def _groups(config: Mapping[str, Any], stored: Mapping[str, _Stored]) -> list[_Group]:
    """What fuse.py runs as one product each, if the model is one of its families."""
    (architecture,) = config["architectures"]
    if architecture.removesuffix("ForCausalLM") not in FAMILIES:
        return []

    def part(name: str) -> _Part:
        return _Part(stored[f"{name}.weight"], stored.get(f"{name}.bias"))

    q, k, v, o = LINEARS_OF_ATTENTION
    gate, up, down = LINEARS_OF_MLP
    groups: list[_Group] = []
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        groups += (
            tuple(part(f"{attention}.{name}") for name in (q, k, v)),
            (part(f"{attention}.{o}"),),
            tuple(part(f"{mlp}.{name}") for name in (gate, up)),
            (part(f"{mlp}.{down}"),),
        )
    is_tied = config.get("tie_word_embeddings") or "lm_head.weight" not in stored
    return [*groups, (part("model.embed_tokens" if is_tied else "lm_head"),)]


def _float32_tensors(file: Path) -> dict[str, _Stored]:
    """Those of a safetensors file: the length of a header, the header, and the tensors."""
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(content.read(length))
    return {
        name: _Stored(8 + length + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
        if entry.get("dtype") == "F32"
    }


def _read(file: RawIOBase, stored: _Stored, numbers: NDArray[np.float32]) -> None:
    """Fill `numbers`, or raise OSError."""
    file.seek(stored.start)
    rest = memoryview(numbers.view(np.uint8).data)
    while rest:
        num_read = file.readinto(rest)
        if not num_read:
            raise OSError("a file of weights is shorter than its header says")
        rest = rest[num_read:]


def _read_biases(file: RawIOBase, group: _Group) -> Tensor | None:
    """All biases side by side, zeros where a part has none; None where no part has one."""
    if all(bias is None for _, bias in group):
        return None
    biases = np.zeros(sum(weight.shape[0] for weight, _ in group), dtype=np.float32)
    start = 0
    for weight, bias in group:
        if bias is not None:
            _read(file, bias, biases[start : start + bias.num_items])
        start += weight.shape[0]
    return torch.from_numpy(biases)


def _num_items(group: _Group) -> int:
    return sum(weight.num_items for weight, _ in group)


def _state(path: str) -> tuple[int, int, int]:
    """What changes when a file does."""
    state = os.stat(path)
    return state.st_ino, state.st_size, state.st_mtime_ns
