"""What a step sampled, on its way from a device: who waits, what is copied, how long it took.

The events of a GPU are stand-ins here, whose device is done when a test says so.
"""

from __future__ import annotations

import pytest
import torch

from lmscope.boundary import ModelRunnerOutput
from lmscope.execute import pending_output
from lmscope.execute.pending_output import Landing, PendingOutput, Ring

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Device:
    """Runs what it has been given once `run` is called; counts who waited for it."""

    def __init__(self) -> None:
        self.given_ms = 0.0
        self.done_ms = 0.0
        self.num_waits = 0

    def run(self) -> None:
        self.done_ms = self.given_ms


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = self.device.given_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.done_ms

    def synchronize(self) -> None:
        self.device.num_waits += not self.query()
        self.device.run()

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "a time that is not known yet"
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    def event(is_timed: bool) -> Event:
        assert is_timed
        return Event(made)

    monkeypatch.setattr(pending_output, "new_event", event)
    monkeypatch.setattr(
        pending_output, "pinned", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype)
    )
    return made


def run_step(landing: Landing, device: Device, took_ms: float) -> PendingOutput:
    """Give the device a step of two tokens that it has not run yet."""
    landing.start()
    device.given_ms += took_ms
    landing.copy(torch.tensor([7, 8]), torch.tensor([0.5, 0.25]), {"mean": torch.ones(2, 3)})
    step = ModelRunnerOutput(step=3)
    return PendingOutput(landing, lambda: step)


def test_a_step_is_waited_for_once_and_by_its_own_event(device):
    landing = Landing(4, CUDA)
    pending = run_step(landing, device, took_ms=3.0)

    assert device.num_waits == 0, "to have it copied waits for nothing"
    assert not landing.is_here()
    assert pending.get_output().step == 3
    assert device.num_waits == 1
    assert landing.is_here()
    pending.wait()
    assert device.num_waits == 1
    assert landing.tokens.tolist() == [7, 8, 0, 0]
    assert landing.watched["mean"].shape == (2, 3)


def test_a_step_lasts_from_its_first_copy_to_its_last(device):
    ring = Ring(4, CUDA)
    first, second = ring.take(), ring.take()
    run_step(first, device, took_ms=3.0)
    run_step(second, device, took_ms=1.5)  # while the device is busy with the first
    device.run()

    assert first.duration_s() == pytest.approx(0.003)
    assert second.duration_s() == pytest.approx(0.0015)


def test_three_steps_are_kept_apart_and_the_fourth_takes_the_place_of_the_first():
    ring = Ring(4, CPU)
    landings = [ring.take() for _ in range(6)]

    assert len({id(each) for each in landings[:3]}) == 3
    assert landings[3:] == landings[:3]


def test_a_cpu_has_nothing_to_wait_for_and_no_time_to_tell():
    landing = Landing(4, CPU)
    landing.start()
    landing.copy(torch.tensor([7]), torch.tensor([0.5]), {})

    landing.wait()
    assert landing.is_here()
    assert landing.duration_s() is None
    assert landing.tokens.tolist() == [7, 0, 0, 0]
