"""Which thread of the process may have torch threads beside it.

OpenMP's threads spin between two products, which is what makes two of them quicker than one. GNU's
libgomp, which torch and numba use, stops that and puts them to sleep as soon as there are more of
its threads in the process than cores: a step of the demo model on two cores then takes 23 ms
instead of 15. Every thread that computes in parallel has threads of its own, for as long as it
lives, so nobody but the engine's thread may do that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["one_torch_thread", "set_torch_threads"]


def set_torch_threads(num_threads: int) -> None:
    """For the calling thread, which is the one that runs the model."""
    import torch

    torch.set_num_threads(num_threads)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch computes on the calling thread alone, so that no others are made for it."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
