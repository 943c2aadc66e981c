"""Frames as docs/picture.md defines them, made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Made = tuple[dict[str, Any], dict[str, np.ndarray]]


def _row(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"r{index}",
        "slot": index if index < 24 else 254,
        "state": "running",
        "why": "decode: 1 token",
        "prompt": 34,
        "cached": 18,
        "computed": 40,
        "output": 7,
        "lost": 0,
        "max": 12,
        "blocks": 9,
        "shared": 4,
        "preemptions": 1,
        "arrived": index,
        "ended": None,
        "prompt_text": "You are a patient tutor.",
        "text": "Glass is a solid.",
        "most_blocks": 11,
        "waited": 3,
    }
    return {**row, **changes}


@pytest.fixture
def make_frame() -> Callable[..., Made]:
    """Builds a full frame: each request holds `held` blocks, then one is kept, one is empty."""

    def make(
        *,
        num_blocks: int = 50,
        num_requests: int = 4,
        held: int = 3,
        has_cells: bool = True,
        rows: list[dict[str, Any]] | None = None,
        **changes: Any,
    ) -> Made:
        slot = np.full(num_blocks, 255, np.uint8)
        state = np.zeros(num_blocks, np.uint8)
        ref = np.zeros(num_blocks, np.uint8)
        fill = np.zeros(num_blocks, np.uint8)
        state[0] = 3
        cells: list[list[Any]] = []
        block_id = 1
        for request in range(num_requests):
            for part in range(held + 1):
                if block_id >= num_blocks:
                    break
                is_kept = part == held
                slot[block_id] = request if request < 24 else 254
                state[block_id] = 2 if is_kept else 1
                ref[block_id] = 0 if is_kept else 1
                fill[block_id] = 4
                owners = [] if is_kept else [f"r{request}"]
                cells.append([block_id, owners, "some text", f"r{request}", None, "b6ebdc64"])
                block_id += 1
        used, kept = int((state == 1).sum()), int((state == 2).sum())
        frame: dict[str, Any] = {
            "v": 1,
            "k": "full",
            "seq": 0,
            "epoch": 0,
            "step": 40,
            "boundary": "EngineCoreOutputs",
            "time": 1.0,
            "phase": "finished",
            "info": {
                "model": "demo",
                "block_size": 4,
                "num_blocks": num_blocks,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 64,
                "max_model_len": 256,
                "engine": "cpu",
            },
            "stat": {
                "used": used,
                "kept": kept,
                "empty": num_blocks - 1 - used - kept,
                "shared": 0,
                "hits": 0,
                "evicted": 0,
                "running": num_requests,
                "waiting": 0,
                "finished": 0,
                "scheduled": 4,
                "decode": 4,
                "prefill": 0,
                "recompute": 0,
                "cached": 0,
                "prompt_tokens": 200,
                "cached_tokens": 90,
                "output_tokens": 50,
                "preemptions": 1,
                "evictions": 25,
                "step_ms": 4.5,
                "device_ms": None,
                "tokens_per_s": None,
            },
            "next": [int(i) for i in np.flatnonzero((state == 0) | (state == 2))[:10]],
            "rows": [_row(i) for i in range(num_requests)] if rows is None else rows,
            "cells": cells if has_cells else [],
            "note": "",
        }
        frame.update(changes)
        return frame, {"slot": slot, "state": state, "ref": ref, "fill": fill}

    return make


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    """Builds one row of a frame."""
    return _row
