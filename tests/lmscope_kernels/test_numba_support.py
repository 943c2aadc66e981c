"""What numba keeps of compiled loops is for the sources that they were made of."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import lmscope_kernels
import pytest
from lmscope_kernels import numba_support
from lmscope_kernels.half_linear_cpu import why_no_half_loops

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)
FOLDER = Path(lmscope_kernels.__file__).parent
LOOPS = sorted(file.stem for file in FOLDER.glob("*_numba.py"))


def test_the_name_changes_with_any_of_the_files(tmp_path):
    def stamp():
        numba_support._sources_stamp.cache_clear()
        return numba_support._sources_stamp(tmp_path)

    files = [tmp_path / name for name in ("a_numba.py", "b_numba.py", "vector_code.py")]
    for file in files:
        file.write_text("x = 1\n")
    (tmp_path / "other.py").write_text("y = 1\n")
    stamps = [stamp()]
    for file in files:
        file.write_text("x = 2\n")
        stamps.append(stamp())
    (tmp_path / "other.py").write_text("y = 2\n")

    assert len(set(stamps)) == 4
    assert stamp() == stamps[-1]


@needs_numba
@pytest.mark.parametrize("name", LOOPS)
def test_every_function_that_numba_keeps_has_the_name(name):
    from numba.core.caching import NullCache
    from numba.core.dispatcher import Dispatcher

    module = importlib.import_module(f"lmscope_kernels.{name}")
    functions = [each for each in vars(module).values() if isinstance(each, Dispatcher)]
    kept = [each for each in functions if not isinstance(each._cache, NullCache)]

    numba_support._sources_stamp.cache_clear()
    stamp = numba_support._sources_stamp(FOLDER)
    assert functions or name == "vectors_numba"
    assert all(each.py_func.__qualname__.endswith(f"_{stamp}") for each in kept)
    assert all(stamp in each._cache._name for each in kept)
    # What others compile into theirs is not kept by itself.
    assert kept or name == "vectors_numba"


# Both in a process of their own: a fork of one that has run tests may hang anywhere.
_FORK = """
import os, sys
import torch
from lmscope_kernels import numba_support
from lmscope_kernels.half_linear_cpu import half_linear, pack_half

torch.manual_seed(0)
rows, tiles = torch.randn(3, 8), pack_half(torch.randn(20, 8))
wanted = half_linear(rows, tiles)
was_parallel = numba_support.use_torch_threads()
child = os.fork()
if child == 0:
    is_same = torch.allclose(half_linear(rows, tiles), wanted, atol=1e-5)
    os._exit(3 if is_same and not numba_support.has_safe_threads() else 4)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status if was_parallel else 5)
"""


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_runs_the_loops_on_the_calling_thread():
    if why_no_half_loops() is not None or not numba_support.has_safe_threads():
        pytest.skip("there are no parallel loops of half precision here")

    done = subprocess.run([sys.executable, "-c", _FORK], timeout=300, capture_output=True)

    assert done.returncode == 3, done.stderr.decode()
