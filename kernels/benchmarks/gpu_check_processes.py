"""Runs the items of gpu_check.py in a process that a kernel may take down, and another after it.

After an illegal access no call of CUDA in a process succeeds any more, and a kernel that does not
end lets none of them return. So whoever writes the summary never touches the device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from gpu_check_report import Check

__all__ = ["LOST_STATUS", "run_in_processes"]

# Of a process that has lost the device and has written down by what.
LOST_STATUS = 3
_POLL_S = 0.5
# To write and load the largest model, and to run 256 requests one by one, takes less.
_MOST_SILENT_S = 180.0
# An item that was begun in time may end later by so much.
_MOST_LATE_S = 60.0


def run_in_processes(
    command: Sequence[str],
    items: Sequence[tuple[int, str]],
    check: Check,
    most_silent_s: float = _MOST_SILENT_S,
) -> None:
    """Start `command` until each of `items`, by number and name, has a line in results.jsonl.

    It gets --budget-s with what is left of the budget. A part that costs it the device is one that
    it does not try again; for an item in which it ends otherwise, or falls silent, a line is
    written here. `check` has all lines at the end, also where this process is told to end.
    """

    def end(*_: object) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        _take_up(check)
        while any(not check.knows(*item) for item in items):
            num_lines = len(check.lines)
            reason = _run_one(command, check, most_silent_s)
            _take_up(check)
            left = [item for item in items if not check.knows(*item)]
            if not left:
                return
            if reason is not None or len(check.lines) == num_lines:
                number, name = left[0]
                check.found(number, name, False, reason or "the device was lost at once")
            if check.left_s < 0:
                for number, name in left[1:]:
                    check.skipped(number, name, "the budget is used up")
                return
    finally:
        _take_up(check)
        signal.signal(signal.SIGTERM, before)


def _take_up(check: Check) -> None:
    check.lines.clear()
    check.measurements.clear()
    check.take_up()


def _run_one(command: Sequence[str], check: Check, most_silent_s: float) -> str | None:
    """Run it to its end; why an item is left unfinished, or None where it has said so itself."""
    results = check.out / "results.jsonl"
    # Models are written here: what is killed leaves gigabytes.
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        process = subprocess.Popen(
            [*command, "--budget-s", f"{max(check.left_s, 1.0):.0f}"],
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        )
        began, heard = time.monotonic(), 0
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                size = results.stat().st_size if results.exists() else 0
                if size != heard:
                    began, heard = time.monotonic(), size
                if time.monotonic() - began > most_silent_s:
                    return f"nothing was heard for {most_silent_s:.0f} s, so it was ended"
                if check.left_s < -_MOST_LATE_S:
                    return f"it ran {_MOST_LATE_S:.0f} s past the budget, so it was ended"
        finally:
            if process.poll() is None:
                # What it has started itself too: builds, and tests.
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    if status in (0, LOST_STATUS):
        return None
    return f"the process ended with status {status}"
