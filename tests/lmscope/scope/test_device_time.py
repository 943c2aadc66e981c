"""How long a GPU worked on each step: in the view, the data frames and the trace."""

from __future__ import annotations

import msgspec
import pytest

from lmscope.boundary import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from lmscope.scope import perfetto
from lmscope.scope.frames import Frames
from lmscope.scope.recording import record
from lmscope.scope.run_log import LOG_NAMES, step_stat
from lmscope.scope.view import EngineView

DEVICE_MS = LOG_NAMES.index("device_ms")


@pytest.fixture
def run(tiny_engine):
    """A recording of four steps, as from a CPU."""
    engine = tiny_engine(num_blocks=20)
    with record(engine) as recording:
        engine.add("abcdefg", max_tokens=4)
        for _ in range(4):
            engine.step()
    return recording


class Timed:
    """The same run where a GPU says how long it took; overlapped ones as their structs come."""

    def __init__(self, recording, durations, *, is_overlapped=False):
        self.snapshot, self.info = recording.snapshot, recording.info
        self.start_time = recording.start_time
        self.boundaries = [
            msgspec.structs.replace(b, device_duration_s=durations.get(b.step))
            if isinstance(b, ModelRunnerOutput)
            else b
            for b in recording.boundaries
        ]
        if is_overlapped:
            place = [isinstance(b, SchedulerOutput) for b in self.boundaries]
            for at in [i for i, is_one in enumerate(place) if is_one][1:]:
                # Before the tokens of the step before.
                output = self.boundaries.pop(at)
                before = next(
                    i
                    for i, b in enumerate(self.boundaries)
                    if isinstance(b, ModelRunnerOutput) and b.step == output.step - 1
                )
                time = self.boundaries[before].time - 1e-4
                self.boundaries.insert(before, msgspec.structs.replace(output, time=time))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_each_step_has_its_own_time_on_the_device(run, is_overlapped):
    timed = Timed(run, {1: 0.0021, 2: 0.0032, 4: 0.0043}, is_overlapped=is_overlapped)
    steps = Frames(timed.snapshot, timed.boundaries).steps

    assert list(steps.device_s.round(6)[[0, 1, 3]]) == [0.0021, 0.0032, 0.0043]
    assert steps.device_s.isna().tolist() == [False, False, True, False]
    spans = [event["args"] for event in perfetto.trace_events(timed) if event.get("cat") == "step"]
    assert [args.get("device ms") for args in spans] == [2.1, 3.2, None, 4.3]


def test_the_view_has_it_from_the_model_output_on(run):
    timed = Timed(run, {1: 0.0021, 2: 0.0032, 4: 0.0043})
    view = EngineView(timed.snapshot)
    seen = []
    for boundary in timed.boundaries:
        view.apply(boundary)
        seen.append((type(boundary), boundary.step, step_stat(view)["device_ms"]))

    assert (SchedulerOutput, 2, None) in seen, "it has not run yet"
    assert (ModelRunnerOutput, 2, 3.2) in seen
    assert (EngineCoreOutputs, 2, 3.2) in seen
    assert (EngineCoreOutputs, 3, None) in seen, "nobody timed it"
    assert [each.counts[DEVICE_MS] for each in view.log.records[1:]] == [2.1, 3.2, None]


def test_overlapped_steps_show_the_time_of_the_step_that_ended_in_them(run):
    timed = Timed(run, {1: 0.0021, 2: 0.0032, 3: 0.001, 4: 0.0043}, is_overlapped=True)
    view = EngineView(timed.snapshot)
    for boundary in timed.boundaries:
        view.apply(boundary)

    assert [each.counts[DEVICE_MS] for each in view.log.records[1:]] == [None, 2.1, 3.2]


def test_a_cpu_says_nothing(run):
    assert run.frames.steps.device_s.isna().all()
    assert step_stat(run.at())["device_ms"] is None
    assert not any("device ms" in event.get("args", {}) for event in perfetto.trace_events(run))
