"""The fold of every recorded trace, overlapped steps and drafts included, step by step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmscope.boundary import EngineInfo, EngineSnapshot, SchedulerOutput
from lmscope.engine.core import EngineCore
from lmscope.scope.view import EngineView, differences

CONFORMANCE = Path(__file__).parents[2] / "conformance"
TRACES = sorted((CONFORMANCE / "traces").glob("*.json"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"trace_view_{name}", CONFORMANCE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


replay, adapter = load("replay"), load("adapter")


class Folding(adapter.SchedulerAdapter):
    """The adapter, with a view that folds what the scheduler says."""

    def __init__(self, config):
        super().__init__(config)
        self.pool.record_events = True
        self.info = EngineInfo(
            model="trace",
            block_size=config["block_size"],
            num_blocks=config["num_gpu_blocks"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            scheduling_policy=config["policy"],
        )
        self.view = EngineView(
            EngineSnapshot(info=self.info, free_queue=tuple(self.pool.free_queue))
        )
        self.problems = []
        self.num_compared = 0
        # An abort is told with the next SchedulerOutput.
        self.has_untold_abort = False

        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output
        add = self.scheduler.add_request

        def fold(boundary):
            self.view.apply(boundary)
            if isinstance(boundary, SchedulerOutput):
                self.has_untold_abort = False
            if not self.has_untold_abort:
                self.num_compared += 1
                found = differences(self.view, self.truth())
                self.problems += [f"step {boundary.step}: {problem}" for problem in found]
            return boundary

        def add_request(request):
            self.view.apply(request.core_request)
            add(request)

        self.scheduler.schedule = lambda: fold(schedule())
        self.scheduler.update_from_output = lambda *arguments: fold(update(*arguments))
        self.scheduler.add_request = add_request

    def abort(self, request_id):
        self.has_untold_abort = True
        super().abort(request_id)

    def truth(self):
        """What the engine itself would answer, by its own code."""
        core = SimpleNamespace(scheduler=self.scheduler, _pool=self.pool)
        blocks, free_queue = EngineCore.snapshot_blocks(core)
        return EngineSnapshot(
            info=self.info,
            step=self.pool.step,
            blocks=blocks,
            free_queue=free_queue,
            requests=EngineCore.snapshot_requests(core, lambda request_id: ""),
        )


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_fold_of_a_trace_equals_the_scheduler_after_every_struct(path):
    trace = replay.load(path)
    folding = Folding(trace["config"])
    replay.replay(trace, folding, skip=replay.OPTIONAL)

    assert folding.num_compared > 5
    assert folding.problems == []


def test_there_are_traces():
    assert len(TRACES) == 64
