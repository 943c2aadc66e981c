"""gpu_check: a dry run goes through every item, where only what it may need can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu_check_kernels import device_test_command
from gpu_check_models import TINY, model_folder, remove_models
from gpu_check_report import Check, Measurement, is_noise, summary

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "kernels" / "benchmarks" / "gpu_check.py"
# What a bare machine with a GPU does not have.
MISSING = (
    *("ipywidgets", "anywidget", "plotly", "zmq", "IPython"),
    *("platformdirs", "accelerate", "gguf", "numba"),
)


def run_script(out, *arguments, missing=MISSING):
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({missing!r}));"
        f"sys.argv[0] = {str(SCRIPT)!r}; sys.path[0] = {str(SCRIPT.parent)!r};"
        f"runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "--out", str(out), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )


def lines_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu_check")
    result = run_script(out, "--dry-run")
    assert result.returncode == 0, result.stdout + result.stderr
    return result, out


def test_a_dry_run_goes_through_every_item_and_nothing_fails(dry_run):
    _, out = dry_run
    lines = lines_of(out)

    assert {line["item"] for line in lines if "took_s" in line} == set(range(1, 9))
    assert not [line for line in lines if line.get("verdict") == "FAIL"]
    measured = {line["item"] for line in lines if "values" in line}
    assert measured == {1, 5, 6, 7}
    assert {line["item"] for line in lines if line.get("verdict") == "pass"} >= {
        1,
        2,
        3,
        4,
        6,
        7,
        8,
    }


def test_a_dry_run_asks_an_engine_for_the_same_bits_and_what_they_cost(dry_run):
    _, out = dry_run
    lines = lines_of(out)

    asked = [line["name"] for line in lines if line["name"].startswith("engine, tiny")]
    for what in ("batch of 2", "chunks of 40 and 56", "preempted, again", "cached prefixes"):
        assert f"engine, tiny, {what}" in asked
    for what in ("chunks of 40 and 56", "preempted", "cached prefixes"):
        assert f"engine, tiny, {what}: it came to that" in asked
    priced = [line for line in lines if "as a multiple of the default" in line["name"]]
    assert [line["item"] for line in priced] == [6] * 3
    products = [
        line for line in lines if line["name"].startswith("batch_invariant_matmul, 135M, g")
    ]
    assert [line["item"] for line in products] == [5] * 2


def test_it_writes_what_it_promises(dry_run):
    result, out = dry_run

    assert {file.name for file in out.iterdir()} == {
        "env.json",
        "results.jsonl",
        "summary.md",
        "trace.json.gz",
    }
    assert all(file.stat().st_size < 16 << 20 for file in out.iterdir())
    environment = json.loads((out / "env.json").read_text())
    assert environment["versions"]["torch"] != "missing"
    assert result.stdout.endswith((out / "summary.md").read_text() + "\n")
    assert "no figure here says anything" in result.stdout


def test_without_the_engine_the_kernels_are_checked_and_it_says_why(tmp_path):
    result = run_script(tmp_path, "--dry-run", "--items", "4", "7", missing=(*MISSING, "msgspec"))

    lines = lines_of(tmp_path)
    assert result.returncode == 1
    passed = [line for line in lines if line["item"] == 4 and line.get("verdict") == "pass"]
    assert len(passed) == 16
    failures = [line for line in lines if line.get("verdict") == "FAIL"]
    assert [line["item"] for line in failures] == [4, 7]
    for failure in failures:
        assert "msgspec" in failure["note"]
        assert "carry its wheel" in failure["note"]


def test_what_does_not_fit_into_the_budget_is_not_begun(tmp_path, capsys):
    check = Check(tmp_path, "cpu", budget_s=50.0)

    assert check.fits(5, "short", 10)
    assert not check.fits(5, "long", 90)

    (line,) = lines_of(tmp_path)
    assert line["verdict"] == "skipped"
    assert line["note"].startswith("takes about 90 s, ")


def test_a_part_that_fails_is_written_down_and_the_next_one_runs(tmp_path, capsys):
    check = Check(tmp_path, "cpu", budget_s=50.0)

    check.attempt(3, "broken", lambda: 1 // 0)  # type: ignore[arg-type]  # its result is not looked at
    check.attempt(3, "whole", lambda: check.found(3, "whole", True))

    assert [line["verdict"] for line in lines_of(tmp_path)] == ["FAIL", "pass"]
    assert check.num_failed == 1


def test_a_goal_between_two_measurements_is_noise():
    def verdict(first, second, **options):
        return Measurement(5, "step", "ms", (first, second), goal=2.0, **options).verdict

    assert verdict(1.0, 1.5) == "pass"
    assert verdict(2.5, 3.0) == "miss"
    assert verdict(1.9, 2.1) == "noise"
    assert verdict(2.5, 3.0, is_more_better=True) == "pass"
    assert is_noise((1.0, 1.2), (1.1, 1.15))
    assert not is_noise((1.0, 1.01), (1.1, 1.11))


def test_the_summary_has_floor_ratio_goal_and_verdict(tmp_path, capsys):
    check = Check(tmp_path, "cuda", budget_s=50.0)
    check.measured(Measurement(6, "step", "ms", (1.0, 3.0), floor=0.5, goal=4.0))
    check.found(3, "norm", False, "error 1, limit 1e-05")

    text = summary(check, {"device": "a device", "date": "a day"})

    assert "| 6 | step | 2 | 1 | ms | 0.5 | 0.25 | 4 | pass |" in text
    assert "- FAIL: item 3, norm: error 1, limit 1e-05" in text
    assert "- 0 of 1 statements hold" in text


def test_without_a_device_only_a_dry_run_starts(tmp_path):
    result = run_script(tmp_path)

    assert result.returncode == 2
    assert "--dry-run goes through the items without one" in result.stderr


def test_models_are_mapped_from_their_file_and_not_copied_first():
    """Sixteen gigabytes are, else, before the first of them goes to a device."""
    import torch
    from transformers import AutoConfig

    from lmscope.models.stored_model import load_stored

    try:
        folder = model_folder(TINY)
        module = load_stored(folder, AutoConfig.from_pretrained(folder), torch.bfloat16)
        assert module is not None
    finally:
        remove_models()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_tests_of_a_device_need_no_package_but_pytest(tmp_path):
    for name in ("hypothesis", "ipywidgets", "plotly", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('is not here')")

    result = subprocess.run(
        [*device_test_command(), "--collect-only"],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_large_pool.py" in result.stdout
