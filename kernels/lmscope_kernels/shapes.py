"""The check of shapes that launchers make: an index beyond a tensor would be any memory at all."""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_shape"]


def check_shape(name: str, tensor: Tensor | None, *shape: int | None) -> None:
    """Raise ValueError unless `tensor` has this shape, where None stands for any size.

    A tensor that is None is one that was not given.
    """
    if tensor is None:
        return
    if tensor.ndim != len(shape) or any(
        size is not None and size != own for size, own in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} is {list(tensor.shape)}, must be [{wanted}]; it does not fit the other tensors"
        )
