"""Where a model runs and in which dtype, on devices that are not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmscope.models import device_choice
from lmscope.models.device_choice import choose_device, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`machine(has_driver=True, ...)` is what the process then finds itself on."""

    def pretend(
        *,
        has_driver: bool = False,
        has_cuda: bool = False,
        built_for: str | None = None,
        has_bfloat16: bool = True,
        current: int = 0,
        visible: str | None = None,
    ) -> None:
        place = tmp_path / "version"
        place.unlink(missing_ok=True)
        if has_driver:
            place.touch()
        monkeypatch.setattr(device_choice, "_DRIVER", place)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16
        )
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


def test_auto_is_the_gpu_where_torch_finds_one_and_else_the_cpu(machine, caplog):
    machine(has_driver=True, has_cuda=True, built_for="13.0")
    assert choose_device("auto") == CUDA
    machine()
    assert choose_device("auto") == CPU
    machine(has_driver=True, visible="")
    assert choose_device("auto") == CPU

    assert caplog.records == [], "as the user has it, and knows it"


def test_of_several_gpus_it_is_the_one_that_is_current_unless_another_is_named(machine):
    """Threads of the engine begin with the first one as theirs, so it must have its number."""
    machine(has_driver=True, has_cuda=True, built_for="13.0", current=2)
    assert choose_device("auto") == torch.device("cuda", 2)
    assert choose_device("cuda") == torch.device("cuda", 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"has_driver": True}, "was built without CUDA; install a build with it"),
        ({"has_driver": True, "built_for": "13.0"}, "CUDA 13.0, which the driver does not serve"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told_with_what_runs_instead(machine, caplog, facts, reason):
    machine(**facts)
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto") == CPU

    (record,) = caplog.records
    assert "runs on the CPU, although there is a GPU" in record.getMessage()
    assert reason in record.getMessage()
    with pytest.raises(ValueError, match=f"torch finds no CUDA device: .*{reason}.*device='cpu'"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "there is no NVIDIA driver"),
        ({"has_driver": True, "visible": "-1"}, "CUDA_VISIBLE_DEVICES hides all of them"),
    ],
)
def test_a_gpu_that_is_asked_for_and_is_not_there_says_why(machine, facts, reason):
    machine(**facts)
    with pytest.raises(ValueError, match=reason):
        choose_device(CUDA)


def test_auto_keeps_the_stored_dtype_on_a_gpu_and_takes_float32_on_a_cpu(machine):
    machine(has_cuda=True)
    assert [choose_dtype("auto", stored, CUDA) for stored in (BF16, FP16, FP32)] == [
        BF16,
        FP16,
        FP32,
    ]
    assert choose_dtype("auto", None, CUDA) == choose_dtype("auto", torch.int8, CUDA) == FP32
    assert choose_dtype("auto", BF16, CPU) == FP32
    assert choose_dtype("bfloat16", FP32, CPU) == BF16


def test_a_gpu_without_bfloat16_runs_in_float16_with_one_warning(machine, caplog):
    machine(has_cuda=True, has_bfloat16=False)
    with caplog.at_level(logging.WARNING):
        assert choose_dtype("auto", BF16, CUDA) == FP16
        assert choose_dtype("auto", FP16, CUDA) == FP16
        assert choose_dtype("auto", FP32, CUDA) == FP32

    (record,) = caplog.records
    assert "bfloat16, which Tesla T4 does not compute in" in record.getMessage()
    assert "they run in float16" in record.getMessage()


@pytest.mark.parametrize("dtype", ["bfloat16", BF16])
def test_bfloat16_that_is_asked_for_and_cannot_be_is_refused(machine, dtype):
    machine(has_cuda=True, has_bfloat16=False)
    with pytest.raises(ValueError, match=r"Tesla T4 does not compute in; use dtype='float16'"):
        choose_dtype(dtype, FP32, CUDA)
    assert choose_dtype("float16", BF16, CUDA) == FP16
    assert choose_dtype(dtype, FP32, CPU) == BF16
