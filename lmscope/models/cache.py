"""The folder where models are kept, and how something gets into it whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from lmscope.config import cache_folder
from lmscope.errors import LmscopeError

__all__ = ["locked_cache", "scratch_folder"]

_SCRATCH_PREFIX = ".partial-"


@contextmanager
def locked_cache() -> Iterator[Path]:
    """Hold the cache folder alone among all processes; the others wait.

    What an earlier process left unfinished is removed on the way in. Raises LmscopeError where
    nothing can be written.
    """
    folder = cache_folder()
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise LmscopeError(
            f"models cannot be kept in {folder} ({error}); set LMSCOPE_CACHE to a folder that "
            "you may write to"
        ) from error
    try:
        for leftover in folder.glob(_SCRATCH_PREFIX + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield folder
    finally:
        lock.release()


@contextmanager
def scratch_folder(cache: Path) -> Iterator[Path]:
    """A new folder inside a locked `cache`, removed at the end, whatever happens.

    It is on the same file system, so what is finished is moved into place with os.replace,
    which another process sees done or not begun.
    """
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
