"""What the benchmarks of a running engine share: CPU time per step, and the report of a run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmscope import LLM, SamplingParams

__all__ = ["generate_anew", "step_us", "steps_of", "thread_ms", "write_report"]


def step_us(llm: LLM, work: Callable[[], object]) -> float:
    """CPU time of the engine thread per step that `work` made it do, in microseconds."""

    def now() -> tuple[float, int]:
        # On the engine thread, whose clock this is; there is no way to ask from outside.
        result: tuple[float, int] = llm._loop.call(
            lambda core: (time.thread_time(), core.step_number)
        )
        return result

    began, first = now()
    work()
    ended, last = now()
    return (ended - began) / (last - first) * 1e6


def steps_of(llm: LLM, work: Callable[[], object]) -> int:
    """How many steps `work` made the engine do."""
    first: int = llm._loop.call(lambda core: core.step_number)
    work()
    last: int = llm._loop.call(lambda core: core.step_number)
    return last - first


def thread_ms(work: Callable[[], object]) -> float:
    """CPU time of the calling thread for some work, in milliseconds."""
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e3


def generate_anew(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Generate for prompts that come again in each run, without what is kept of them.

    RuntimeError when that cannot be forgotten: there would be no prefill.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be reset")
    given = [{"prompt_token_ids": list(token_ids)} for token_ids in prompts]
    llm.generate(given, params, use_tqdm=False)


def write_report(
    path: str | None,
    versions: Mapping[str, str],
    load_before: tuple[float, float, float],
    **measured: Any,
) -> None:
    """Write the date, the machine and what was measured to a JSON file; None: nowhere.

    load_before    the load averages when the run began
    """
    if path is None:
        return
    report = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "versions": dict(versions),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        **measured,
    }
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
