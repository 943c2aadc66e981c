"""Where a model is: from the name that a user gives to a folder or a hub id."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lmscope.config import cache_folder
from lmscope.models.cache import locked_cache, scratch_folder
from lmscope.models.demo import DEMO_FILE, demo_folder, ensure_demo_model
from lmscope.models.model_folder import check_folder

__all__ = ["find_model", "folder_at_hand", "gguf_source"]


def find_model(model: str | Path, show_progress: bool) -> str:
    """The folder or hub id that transformers loads `model` from.

    Fetches the demo model, converts a GGUF file and checks that a folder has its files; raises
    as load_model says.
    """
    if model == "demo":
        return str(ensure_demo_model(show_progress))
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {str(model)!r}; check the path of the GGUF file")
        return str(_converted(path, show_progress))
    if path.is_dir():
        check_folder(path)
        return str(path)
    # A hub id is one name or two; anything else was meant as a path.
    if isinstance(model, Path) or model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise ValueError(
            f"there is no folder {str(model)!r}; give a folder with safetensors, a .gguf file, "
            'a hub id such as "Qwen/Qwen3-0.6B", or "demo"'
        )
    return model


def gguf_source(model: str | Path) -> Path | None:
    """The GGUF file that find_model's folder was made of; None: it was made of none."""
    if model == "demo":
        return cache_folder() / DEMO_FILE
    path = Path(model).expanduser()
    return path if path.suffix == ".gguf" else None


def folder_at_hand(model: str | Path) -> Path | None:
    """The folder that find_model gives, if there is nothing to be fetched or converted for it."""
    if model == "demo":
        folder = demo_folder()
    else:
        folder = Path(model).expanduser()
        if folder.suffix == ".gguf" and folder.is_file():
            folder = _folder_of(folder)
    return folder if folder.is_dir() else None


def _converted(file: Path, show_progress: bool) -> Path:
    """The folder made of a GGUF file, kept in the cache until the file changes."""
    target = _folder_of(file)
    if target.is_dir():
        return target
    with locked_cache() as cache:
        if not target.is_dir():
            # Here, not above: other models need not load gguf.
            from lmscope.models.gguf_file import convert_gguf

            with scratch_folder(cache) as scratch:
                converted = scratch / target.name
                converted.mkdir()
                convert_gguf(file, converted, show_progress=show_progress)
                target.parent.mkdir(exist_ok=True)
                os.replace(converted, target)
    return target


def _folder_of(file: Path) -> Path:
    """Where the folder made of this state of a GGUF file is, or will be."""
    state = file.stat()
    identity = f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return cache_folder() / "gguf" / name
