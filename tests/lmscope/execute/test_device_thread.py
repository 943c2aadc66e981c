"""DeviceThread: in order, one after the other, and nothing behind an error."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from lmscope.execute.device_thread import DeviceThread

DEADLINE_S = 200


@pytest.fixture
def device():
    made = DeviceThread("device-under-test")
    yield made
    made.close()
    assert "device-under-test" not in [thread.name for thread in threading.enumerate()]


def test_runs_in_order_on_a_thread_of_its_own(device):
    ran = []
    futures = [device.submit(lambda n=n: ran.append(n) or n * n) for n in range(20)]
    assert [future.result(DEADLINE_S) for future in futures] == [n * n for n in range(20)]
    assert ran == list(range(20))
    name = device.submit(lambda: threading.current_thread().name).result(DEADLINE_S)
    assert name == "device-under-test"


def test_behind_an_error_nothing_runs_and_everybody_hears_of_it(device):
    ran = []
    futures = [device.submit(lambda: 1 // 0), device.submit(lambda: ran.append(1))]
    for future in futures:
        with pytest.raises(ZeroDivisionError):
            future.result(DEADLINE_S)
    assert ran == []


def test_settings_that_fail_are_heard_of_by_the_first_batch():
    def prepare():
        raise RuntimeError("no such setting")

    device = DeviceThread("device-under-test", prepare)
    with pytest.raises(RuntimeError, match="no such setting"):
        device.submit(lambda: 1).result(DEADLINE_S)
    device.close()


def test_close_lets_the_one_that_runs_end_and_cancels_the_rest():
    device = DeviceThread("device-under-test")
    go, begun = threading.Event(), threading.Event()
    first = device.submit(lambda: begun.set() or go.wait(DEADLINE_S))
    second = device.submit(lambda: 2)
    assert begun.wait(DEADLINE_S)
    closer = threading.Thread(target=device.close)
    closer.start()
    while not device._is_closed:
        threading.Event().wait(0.001)
    go.set()
    closer.join(DEADLINE_S)
    assert first.result(DEADLINE_S) is True
    with pytest.raises(CancelledError):
        second.result(DEADLINE_S)


def test_without_a_function_there_is_no_thread():
    device = DeviceThread("never-used")
    assert "never-used" not in [thread.name for thread in threading.enumerate()]
    device.close()
