"""What is said on stderr while a model is loaded, and whether anybody sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lmscope_kernels.numba_support import why_not_numba

__all__ = ["is_stderr_watched", "tell_of_compiling"]

_COMPILING = "lmscope compiles loops for this processor, once after an installation: some 20 s\n"


def is_stderr_watched() -> bool:
    """Whether somebody sees a bar: in a notebook or a terminal, not in a log or a test."""
    # A kernel has loaded IPython; here it must not be.
    ipython = sys.modules.get("IPython")
    if ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None:
        return True
    is_terminal: Callable[[], bool] | None = getattr(sys.stderr, "isatty", None)
    return is_terminal is not None and is_terminal()


def tell_of_compiling() -> None:
    """Have it said why the first load takes long, if it comes to compiling loops."""
    if why_not_numba() is not None or not is_stderr_watched():
        return
    # Here, not above: it needs the extra, which may be missing.
    from lmscope_kernels.numba_events import call_before_compiling

    call_before_compiling(lambda: sys.stderr.write(_COMPILING))
