"""Large frames, deflated for their way to the page.

Words repeat, so the header of a full frame with sixty requests shrinks to a tenth. A short
header is not worth it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["pack"]

# Bytes of a header that still goes as it is.
_MOST_PLAIN = 16_384
# More would take longer and save little.
_LEVEL = 1


def pack(message: dict[str, Any], buffers: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """What to send for a message: itself, or its header deflated before its buffers."""
    if message["k"] not in ("full", "delta"):
        return message, list(buffers)
    header = msgspec.json.encode(message)
    if len(header) <= _MOST_PLAIN:
        return message, list(buffers)
    return {"k": "packed"}, [zlib.compress(header, _LEVEL), *buffers]
