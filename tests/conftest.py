"""What holds for every test: one torch thread, no network, checked batches, no forbidden skip."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Before anything loads torch. Two threads on a machine that is shared take fifty times as long
# as one, and the processes that tests start inherit this.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"
# The demo model comes from the cache or from the package index, nothing from a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Each batch is looked through for blocks and slots beyond the pool before it runs.
os.environ["LMSCOPE_CHECK"] = "1"
# tokenizers warns when a process that has used its threads forks.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Time never decides a test, and the same commit draws the same examples; `make fuzz` draws
# new ones.
hypothesis.settings.register_profile("lmscope", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("lmscope")

_REQUIRED = frozenset(os.environ.get("LMSCOPE_REQUIRE", "").replace(",", " ").split())


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Undo what an engine before set, without loading torch for tests that do not use it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model, fetched at the first use on a machine."""
    from lmscope.models.demo import ensure_demo_model

    return ensure_demo_model(show_progress=False)


_CELL_DEADLINE_S = 300  # a cell takes a fraction of it; it ends a run that hangs

# Runs in a kernel before the first cell. A machine of two cores gives the engine one torch
# thread; and what wants the network must fail here, not at a reader's desk.
_KERNEL_STARTUP = """
import os, socket

def _refuse(self, address):
    raise OSError(f"a cell tried to reach {address}")

os.cpu_count = lambda: 2
socket.socket.connect = _refuse
socket.socket.connect_ex = _refuse
"""


@pytest.fixture(scope="session")
def run_notebook(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[NotebookNode], NotebookNode]:
    """Runs the cells of a notebook in a fresh kernel, offline, and keeps no widget state.

    It runs in an empty folder, where the notebook may write. An error in a cell raises.
    """

    def run(notebook: NotebookNode) -> NotebookNode:
        from nbclient import NotebookClient

        folder = tmp_path_factory.mktemp("notebook")
        startup = folder / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "00-offline.py").write_text(_KERNEL_STARTUP)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=_CELL_DEADLINE_S,
            store_widget_state=False,
            resources={"metadata": {"path": str(folder)}},
        )
        return client.execute(env={**os.environ, "IPYTHONDIR": str(folder / "ipython")})

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the demo model, so that a commit can be checked without it.

    Tests that drive a browser come last: Playwright leaves an event loop running in the main
    thread, in which asyncio.run() refuses to work.
    """
    for item in items:
        if "demo_model" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
    items.sort(key=lambda item: "e2e" in item.path.parts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test that carries a marker which LMSCOPE_REQUIRE names."""
    report = yield
    required = sorted(_REQUIRED.intersection(mark.name for mark in item.iter_markers()))
    if report.skipped and required and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, and LMSCOPE_REQUIRE names {', '.join(required)}: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that skips itself: its tests, and so their markers, are not known."""
    report = yield
    if report.skipped and _REQUIRED:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped as a whole, and LMSCOPE_REQUIRE is set; "
            f"skip its tests one by one"
        )
    return report
