"""Zeros that take memory only where something is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lmscope.models.lazy_zeros import lazy_zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 16, 3, 64), (1, 1, 1, 1), (7,), (3, 5)])
def test_they_are_zeros_that_can_be_written(shape, dtype):
    zeros = lazy_zeros(shape, dtype, CPU)
    assert zeros.equal(torch.zeros(shape, dtype=dtype))
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % 64 == 0
    zeros += 1
    assert zeros.equal(torch.ones(shape, dtype=dtype))


def test_two_of_them_share_nothing():
    first, second = (lazy_zeros((4,), torch.float32, CPU) for _ in range(2))
    first += 1
    assert second.sum() == 0


@pytest.mark.parametrize("num_items", [1 << 55, 1 << 70])
def test_more_than_there_is_has_the_error_of_torch(num_items):
    with pytest.raises(RuntimeError, match="not enough memory"):
        lazy_zeros((num_items,), torch.float32, CPU)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_what_is_not_written_takes_no_memory():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    zeros = lazy_zeros((1 << 28,), torch.float32, CPU)  # a gigabyte
    zeros[:1024] = 1
    assert resident_bytes() - before < 64 << 20
    assert sys.getrefcount(zeros) > 0  # it lives up to here
