"""How many torch threads an engine gets, and what it says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmscope import LLM
from lmscope.config import MAX_DEFAULT_THREADS, default_threads, num_cores


@pytest.fixture
def machine(monkeypatch):
    """`machine(cores, threads_per_core)` is what the process then finds itself on."""

    def pretend(cores, threads_per_core=1):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        count = cores * threads_per_core
        monkeypatch.setattr(os, "cpu_count", lambda: count)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
        monkeypatch.setattr(
            Path,
            "read_text",
            # Hardware threads n and n + cores are on one core.
            lambda path: f"core {int(path.parts[5].removeprefix('cpu')) % cores}",
        )

    return pretend


@pytest.mark.parametrize(
    ("cores", "threads_per_core", "threads"),
    [(1, 1, 1), (2, 1, 1), (4, 2, 3), (8, 1, 7), (64, 2, MAX_DEFAULT_THREADS)],
)
def test_the_notebook_keeps_a_core(machine, cores, threads_per_core, threads):
    machine(cores, threads_per_core)

    assert num_cores() == cores
    assert default_threads() == threads


def test_cores_that_the_process_may_not_use_do_not_count(machine, monkeypatch):
    machine(8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5}, raising=False)

    assert num_cores() == 3
    assert default_threads() == 2


@pytest.mark.parametrize(("limit", "threads"), [("3", 3), ("99", 7), ("0", 7), ("many", 7)])
def test_omp_num_threads_is_a_limit(machine, monkeypatch, limit, threads):
    machine(8)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)

    assert default_threads() == threads


def test_the_plan_says_how_many_threads_and_why(machine):
    machine(8)
    options = {"execute": "scripted", "script": lambda request_id, position: 97}

    with LLM("s", **options) as llm, LLM("s", **options, threads=3) as other:
        assert str(llm.plan.threads) == "7: 8 cores, of which the notebook keeps one"
        assert str(other.plan.threads) == "3: as asked"
        assert str(llm.plan.body) == "none: a script says what is sampled"
        assert str(llm.plan.device) == "none: a script says what is sampled"
        assert "attention" not in str(llm)
        assert (llm.tap.info.device, llm.tap.info.attention_backend) == ("", "")


LOAD = """
import os, sys, threading
import torch
from lmscope import LLM

def num_unknown():
    tasks = {int(number) for number in os.listdir("/proc/self/task")}
    return len(tasks - {thread.native_id for thread in threading.enumerate()})

torch.set_num_threads(2)
before = num_unknown()
with LLM(sys.argv[1], threads=2) as llm:
    print(num_unknown() - before, torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_loading_leaves_no_torch_threads_beside_the_engines(demo_model):
    """Such threads, even asleep, would make those of the engine sleep between two products."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(demo_model)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    assert result.stdout.split() == ["0", "2"]
