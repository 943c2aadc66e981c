"""Whether numba compiles loops here, and on how many threads they run."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

import torch

__all__ = ["has_safe_threads", "use_torch_threads", "why_not_numba"]


@lru_cache(maxsize=1)
def why_not_numba() -> str | None:
    """Why loops cannot be compiled here; None: they can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install lmscope[cpu] makes it faster"
    try:
        importlib.import_module("lmscope_kernels.decode_attention_numba")
    except (ImportError, RuntimeError, OSError) as error:
        return f"numba is installed and does not run ({error})"
    return None


@lru_cache(maxsize=1)
def has_safe_threads() -> bool:
    """Whether numba has threads that two engines in one process may use at once.

    Its own simple pool ends the process when they do; the loops then run on the calling thread.
    """
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
    if not has_safe_threads():
        return False
    numba = importlib.import_module("numba")
    num_threads = torch.get_num_threads()
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    # numba starts its pool by giving the calling thread every core, in the OpenMP that is torch's
    # too; a torch that was told one thread would run on all of them from then on.
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return True
