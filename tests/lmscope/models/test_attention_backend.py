"""Which attention back end runs, by what is asked for and what is there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lmscope.models import attention_backend
from lmscope.models.attention_backend import choose_attention_backend

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch):
    """`there(why)`: kernels cannot run, and why; "" lets them run."""

    def set_answer(why: str) -> None:
        monkeypatch.setattr(attention_backend, "is_available", lambda *_: (not why, why))

    return set_answer


def choose(asked: str = "auto", device: torch.device = CUDA, **changes: Any):
    facts: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "head_size": 128,
        "num_query_heads": 16,
        "num_kv_heads": 8,
        **changes,
    }
    return choose_attention_backend(asked, device=device, **facts)


def test_a_gpu_that_can_has_triton_and_a_cpu_has_torch(there):
    there("")
    assert choose()[:2] == ("triton", "the device is cuda")
    assert choose().warning == ""
    assert choose(device=CPU)[:2] == ("torch", "the device is cpu")
    assert choose("torch").name == "torch"
    assert choose("triton").name == "triton"


@pytest.mark.parametrize(
    ("why", "changes", "match"),
    [
        ("Triton is not installed", {}, "not installed"),
        ("GTX 1080 is sm_61, and the Triton kernels need sm_80", {}, "sm_61"),
        ("", {"head_size": 100}, "heads have 100 numbers"),
        ("", {"head_size": 512}, "heads have 512 numbers"),
        ("", {"num_query_heads": 256, "num_kv_heads": 1}, "256 query heads share"),
    ],
)
def test_a_gpu_that_cannot_says_once_what_runs_instead(there, caplog, why, changes, match):
    there(why)
    chosen = choose(**changes)
    with caplog.at_level(logging.WARNING):
        chosen.warn()

    assert chosen.name == "torch"
    (record,) = caplog.records
    assert "attention runs in torch" in record.getMessage()
    assert match in record.getMessage()
    with pytest.raises(ValueError, match=match):
        choose("triton", **changes)


def test_a_batch_invariant_engine_on_a_gpu_is_one_of_kernels_or_none(there):
    there("")
    for chosen in (choose(batch_invariant=True), choose("triton", batch_invariant=True)):
        assert chosen.name == "triton"
        assert chosen.warning == ""
        assert "one Triton kernel, in one tile" in chosen.line().what
    assert "one tile" not in choose().line().what
    with pytest.raises(ValueError, match=r"only the Triton kernels .* or device='cpu'"):
        choose("torch", batch_invariant=True)
    for asked in ("auto", "triton"):
        with pytest.raises(ValueError, match=r"heads have 100 numbers.*leave batch_invariant out"):
            choose(asked, batch_invariant=True, head_size=100)
    there("Triton is not installed")
    with pytest.raises(ValueError, match=r"cannot run: Triton is not installed; use device='cpu'"):
        choose(batch_invariant=True)
    assert choose(device=CPU, batch_invariant=True)[:2] == ("torch", "the device is cpu")
    assert choose("torch", device=CPU, batch_invariant=True).name == "torch"


def test_nothing_is_said_where_nothing_else_was_to_be_expected(there, caplog):
    there("Triton is not installed")
    choose("torch").warn()
    choose(device=CPU).warn()

    assert caplog.records == []


def test_triton_on_a_cpu_needs_the_interpreter():
    with pytest.raises(ValueError, match=r"use attention_backend='torch', or set TRITON_INTERPRET"):
        choose("triton", CPU, dtype=torch.float32)
