"""Launchers with nothing launched: what a layer would launch, and the table."""

from __future__ import annotations

from importlib.util import find_spec

import launches
import pytest
import torch
from lmscope_kernels.rms_norm import rms_norm

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_a_layer_launches_the_kernels_of_a_forward_and_nothing_runs():
    layer = launches.Layer()

    with launches.nothing_launched() as launched:
        layer.run()

    assert launched == [
        *["rms_norm_kernel"] * 2,
        "store_kv_kernel",
        "paged_attention_kernel",
        "rms_norm_kernel",
        "silu_mul_kernel",
        "rms_norm_kernel",
    ]
    assert not layer.hidden.any()
    # As before: what was let through meanwhile is not let through any more.
    with pytest.raises(RuntimeError, match="Triton runs on CUDA devices"):
        rms_norm(torch.zeros(16, 64), torch.zeros(64), 1e-5)


@needs_triton
def test_each_launcher_is_measured(capsys, tmp_path):
    assert launches.main(["--rounds", "1", "--out", str(tmp_path / "launches.json")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| rms_norm",
        "| rms_norm with a residual",
        "| silu_mul",
        "| store_kv",
        "| unified_attention",
        "| paged_decode, two kernels",
        "| a layer of a prefill, seven kernels",
        "| 28 such layers",
    ]
    assert (tmp_path / "launches.json").exists()


def test_the_last_line_is_as_many_layers():
    *_, layer, all_layers = launches.table({"rms_norm": 4.0, "a layer": 30.04})

    assert layer == "| a layer | 30.0 |"
    assert all_layers == "| 28 such layers | 841 |"


def test_rounds_must_be_at_least_one():
    with pytest.raises(SystemExit):
        launches.main(["--rounds", "0"])
