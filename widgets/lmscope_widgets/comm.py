"""One guarded repair of how ipykernel routes messages from a widget."""

from __future__ import annotations

__all__ = ["pin_comm"]


def pin_comm(comm: object) -> bool:
    """Have messages from the page handled where the page asked for it.

    From 7.4 on, ipykernel hands them to the subshell that last published on the comm. A
    thread publishes as the main shell, so while a cell runs every click on a live view
    would wait for the end of that cell. Returns whether there was anything to repair:
    older kernels, and front ends without subshells, need nothing.

    This only makes buttons answer sooner; nothing may depend on it.
    """
    if not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True
