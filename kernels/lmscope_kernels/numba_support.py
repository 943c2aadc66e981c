"""Whether numba compiles loops here, and on how many threads they run."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

__all__ = ["has_safe_threads", "of_these_sources", "use_torch_threads", "why_not_numba"]

Function = TypeVar("Function", bound=Callable[..., object])


@lru_cache(maxsize=1)
def why_not_numba() -> str | None:
    """Why loops cannot be compiled here; None: they can."""
    if not is_numba_installed():
        return "numba is not installed; pip install lmscope[cpu] makes it faster"
    try:
        importlib.import_module("lmscope_kernels.decode_attention_numba")
    except (ImportError, RuntimeError, OSError) as error:
        return f"numba is installed and does not run ({error})"
    return None


def is_numba_installed() -> bool:
    """Whether somebody wants loops to be compiled, which may not work."""
    return importlib.util.find_spec("numba") is not None


def of_these_sources(function: Function) -> Function:
    """A function that numba is to cache, under a name that changes with any loop it may contain.

    numba compiles anew when the file of a function changes, and does not see that a function in
    another file did, which is inside the compiled one.
    """
    function.__qualname__ += f"_{_sources_stamp(Path(__file__).parent)}"
    return function


@lru_cache(maxsize=1)
def _sources_stamp(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted((*folder.glob("*_numba.py"), folder / "vector_code.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# Where parallel loops ran first.
_process_of_pool: int | None = None


def has_safe_threads() -> bool:
    """Whether numba has threads that two engines in one process may use at once.

    Its own simple pool ends the process when they do; the loops then run on the calling thread.
    So they do in a process that was forked from one in which the others ran: OpenMP's threads are
    not in it, and numba ends a process that calls for them.
    """
    return _has_safe_pool() and _process_of_pool in (None, os.getpid())


@lru_cache(maxsize=1)
def _has_safe_pool() -> bool:
    for pool in ("omppool", "tbbpool"):
        try:
            importlib.import_module(f"numba.np.ufunc.{pool}")
        except ImportError:
            continue
        return True
    return False


def use_torch_threads() -> bool:
    """Let the parallel loops that this thread calls next have as many threads as torch has.

    False: they must not be called, and the serial ones take their place. With one thread too,
    parallel loops are called where they can be: serial ones are compiled to other bits.
    """
    global _process_of_pool
    if not has_safe_threads():
        return False
    _process_of_pool = os.getpid()
    numba = importlib.import_module("numba")
    num_threads = torch.get_num_threads()
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    # numba starts its pool by giving the calling thread every core, in the OpenMP that is torch's
    # too; a torch that was told one thread would run on all of them from then on.
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return True
