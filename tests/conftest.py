"""What holds for every test: one torch thread, no network, and no skip where none is allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# Before anything loads torch. Two threads on a machine that is shared take fifty times as long
# as one, and the processes that tests start inherit this.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"
# The demo model comes from the cache or from the package index, nothing from a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the demo model, so that a commit can be checked without it."""
    for item in items:
        if "demo_model" in getattr(item, "fixturenames", ()):
            item.add_marker("model")


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
