"""What is said on stderr while a model is loaded."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from lmscope.models.telling import is_stderr_watched

_LOAD = """
import sys
from lmscope.models import telling
telling.is_stderr_watched = lambda: True
from lmscope.models.loader import load_model
for _ in range(2):
    load_model(sys.argv[1], show_progress=False).body(exact=False)
"""


def test_a_terminal_and_a_notebook_are_seen_and_a_log_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    for stream, is_seen in [
        (io.StringIO(), False),
        (None, False),
        (object(), False),
        (SimpleNamespace(isatty=lambda: True), True),
    ]:
        monkeypatch.setattr(sys, "stderr", stream)
        assert is_stderr_watched() == is_seen
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for shell, is_seen in [
        (None, False),
        (SimpleNamespace(), False),  # the IPython of a terminal
        (SimpleNamespace(kernel=object()), True),
    ]:
        ipython = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert is_stderr_watched() == is_seen


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs the extra cpu")
def test_compiling_is_said_once_by_the_process_that_does_it_and_by_no_other(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, intermediate_size=64, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "loops")}

    said = [
        subprocess.run(
            [sys.executable, "-c", _LOAD, str(tmp_path / "model")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stderr.count("lmscope compiles loops")
        for _ in range(2)
    ]

    assert said == [1, 0]
