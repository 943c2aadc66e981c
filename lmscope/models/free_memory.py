"""How much memory of this machine is free."""

from __future__ import annotations

import os

__all__ = ["available_memory_bytes", "free_memory_bytes"]


def free_memory_bytes() -> int:
    """Memory that can be had without swapping; a guess where the system does not say."""
    available = available_memory_bytes()
    if available is not None:
        return available
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def available_memory_bytes() -> int | None:
    """The same where the system says it, as Linux does; None elsewhere."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
