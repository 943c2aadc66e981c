"""What numba keeps of compiled loops is for the sources that they were made of."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import lmscope_kernels
import pytest
from lmscope_kernels import numba_support

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


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs the extra cpu")
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
