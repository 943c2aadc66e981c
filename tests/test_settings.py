"""The settings that hold for every test: see conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

SKIPPED = """
import pytest

@pytest.mark.browser
def test_skips_itself():
    pytest.skip("no browser here")

@pytest.mark.skip(reason="never")
@pytest.mark.browser
def test_is_marked_as_skipped():
    pass

def test_needs_no_browser():
    pytest.skip("for another reason")
"""


def run_pytest(folder: Path, source: str, *arguments: str, required: str = "") -> tuple[int, str]:
    """Exit status and output for `source` as a test file under our conftest."""
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (folder / "test_it.py").write_text(source)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", HERE.parent / "pyproject.toml", ".", *arguments],
        cwd=folder,
        env={**os.environ, "LMSCOPE_REQUIRE": required},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def test_a_skipped_test_passes_where_nothing_is_required(tmp_path: Path):
    code, output = run_pytest(tmp_path, SKIPPED)
    assert code == 0
    assert "3 skipped" in output


def test_a_skipped_test_fails_where_its_marker_is_required(tmp_path: Path):
    code, output = run_pytest(tmp_path, SKIPPED, required="browser")
    assert code == 1
    assert "1 failed, 1 skipped, 1 error" in output
    assert "LMSCOPE_REQUIRE names browser: Skipped: no browser here" in output


def test_a_file_that_skips_itself_fails_where_anything_is_required(tmp_path: Path):
    source = "import pytest\npytest.importorskip('no_such_module')\n"
    assert run_pytest(tmp_path, source)[0] == 5  # no test was run
    assert run_pytest(tmp_path, source, required="browser")[0] == 2


def test_what_uses_the_demo_model_can_be_left_out(tmp_path: Path):
    source = "def test_loads_it(demo_model): pass\ndef test_needs_none(): pass\n"
    code, output = run_pytest(tmp_path, source, "-m", "not model")
    assert code == 0
    assert "1 passed, 1 deselected" in output


def test_torch_uses_one_thread_and_the_hub_is_off():
    import torch

    assert torch.get_num_threads() == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_engines_check_their_batches():
    from lmscope import LLM

    with LLM("s", execute="scripted", script=lambda request_id, position: 97) as llm:
        assert llm.config.check_batches
