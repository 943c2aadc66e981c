"""The recordings in this folder, packed or not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["load"]

FOLDER = Path(__file__).parent


def load(name: str) -> list[dict[str, Any]]:
    """The cases of `name`.json, or of `name`.json.gz where it is large."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        text = path.read_text(encoding="utf-8")
    else:
        text = gzip.decompress(path.with_suffix(".json.gz").read_bytes()).decode()
    cases: list[dict[str, Any]] = json.loads(text)["cases"]
    return cases
