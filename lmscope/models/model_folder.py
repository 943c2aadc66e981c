"""What a model's folder must hold, checked before transformers reads any of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

__all__ = ["check_folder", "in_which_files"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> None:
    """Raise ValueError, saying which file is missing, unless config and weights are there."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json, so it is not a model that transformers saved; "
            "give the folder that save_pretrained() wrote"
        )
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if not weights:
        _refuse_without_weights(folder)
    if _WEIGHTS in weights:
        return
    if not (folder / _INDEX).is_file():
        raise ValueError(
            f"{folder} has {weights[0]} and neither {_WEIGHTS} nor {_INDEX}, which says what is "
            "in which part; fetch its files again"
        )
    names = defaultdict(list)
    for name, file in _weight_map(folder).items():
        names[file].append(name)
    for file in sorted(set(names).difference(weights)):
        raise ValueError(
            f"{folder} lacks {file}, which holds {len(names[file])} of its tensors, among them "
            f"{names[file][0]}; fetch its files again"
        )


def in_which_files(folder: Path, tensor_names: Sequence[str]) -> tuple[str, ...]:
    """The files of `folder` that should hold these tensors."""
    if (folder / _WEIGHTS).is_file():
        return (_WEIGHTS,)
    weight_map = _weight_map(folder)
    # The index may lack a name too, and then it is the file to blame.
    return tuple(dict.fromkeys(weight_map.get(name, _INDEX) for name in tensor_names))


def _refuse_without_weights(folder: Path) -> None:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has its weights in {pickled[0]}, which can run any code when it is read; "
            "lmscope reads safetensors only, so load it once with transformers and save it with "
            "save_pretrained()"
        )
    raise ValueError(f"{folder} has no weights; it must hold {_WEIGHTS} or its parts")


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file, as the index has it."""
    try:
        content = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        weight_map: dict[str, str] = content["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / _INDEX} is not an index of weights ({error}); fetch its files again"
        ) from error
    return weight_map
