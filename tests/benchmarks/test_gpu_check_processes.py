"""gpu_check where a process loses the device, is silent, or dies: the next one goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_check_processes import LOST_STATUS, run_in_processes
from gpu_check_report import Check, DeviceLost, Measurement

ITEMS = [(1, "one"), (2, "two"), (3, "three")]
BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"
# Does the items one by one; the body says what happens in the second.
SCRIPT = """
import argparse, os, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from gpu_check_report import Check, DeviceLost, Measurement
parser = argparse.ArgumentParser()
parser.add_argument("--out"), parser.add_argument("--budget-s", type=float)
options = parser.parse_args()
check = Check(Path(options.out), "cuda", options.budget_s)
check.take_up()
(check.out / f"tmp-{{len(check.lines)}}").write_text(os.environ["TMPDIR"])
def second():
    {second}
for number, name in {items!r}:
    if not check.knows(number, name):
        if number == 2:
            second()
        check.write(item=number, name=name, took_s=0.1)
"""


def run(tmp_path: Path, second: str, budget_s: float = 60.0, most_silent_s: float = 30.0) -> Check:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(BENCHMARKS), second=second, items=ITEMS))
    check = Check(tmp_path, "cuda", budget_s)
    command = [sys.executable, str(script), "--out", str(tmp_path)]
    run_in_processes(command, ITEMS, check, most_silent_s)
    return check


def failures(check: Check) -> list[tuple[str, str]]:
    return [(each["name"], each["note"]) for each in check.lines if each.get("verdict") == "FAIL"]


def test_nothing_is_begun_twice_where_all_goes_well(tmp_path, capfd):
    check = run(tmp_path, "check.measured(Measurement(2, 'a', 'us', (1.0, 2.0), 0.5, 3.0, True))")

    assert [each["name"] for each in check.lines] == ["one", "a", "two", "three"]
    (measurement,) = check.measurements
    assert measurement == Measurement(2, "a", "us", (1.0, 2.0), 0.5, 3.0, is_more_better=True)


def test_a_part_that_loses_the_device_is_left_out_and_its_item_goes_on(tmp_path, capfd):
    parts = (
        "check.is_lost = lambda: True\n"
        "    try: check.attempt(2, 'bad kernel', lambda: 1 // 0)\n"
        f"    except DeviceLost: sys.exit({LOST_STATUS})\n"
        "    check.found(2, 'good kernel', True)"
    )
    check = run(tmp_path, parts)

    names = [each["name"] for each in check.lines]
    assert names == ["one", "bad kernel", "good kernel", "two", "three"]
    ((name, note),) = failures(check)
    assert name == "bad kernel"
    assert "ZeroDivisionError" in note


@pytest.mark.parametrize(
    ("second", "note"),
    [
        ("time.sleep(600)", "nothing was heard for 2 s"),
        ("os.kill(os.getpid(), 11)", "status -11"),
        (f"sys.exit({LOST_STATUS})", ""),
    ],
)
def test_an_item_that_ends_its_process_fails_and_the_next_one_runs(tmp_path, capfd, second, note):
    check = run(tmp_path, second, most_silent_s=2.0)

    ((name, said),) = failures(check)
    assert name == "two"
    assert note in said
    assert check.knows(3, "three")
    # Of what was killed nothing is left.
    assert not [f for f in tmp_path.glob("tmp-*") if Path(f.read_text()).exists()]


def test_a_process_that_does_nothing_at_all_costs_each_item_one_try(tmp_path, capfd):
    check = Check(tmp_path, "cuda", 60.0)
    run_in_processes([sys.executable, "-c", "raise SystemExit(3)"], ITEMS, check)

    assert [name for name, _ in failures(check)] == ["one", "two", "three"]


def test_what_a_killed_process_had_half_written_is_passed_over(tmp_path, capfd):
    (tmp_path / "results.jsonl").write_text('{"item": 1, "name": "one", "took_s": 1}\n{"item": 2')
    check = Check(tmp_path, "cuda", 60.0)
    check.take_up()

    assert [each["name"] for each in check.lines] == ["one"]
    check.found(2, "two", True)
    again = Check(tmp_path, "cuda", 60.0)
    again.take_up()
    assert [each["name"] for each in again.lines] == ["one", "two"]


def test_an_end_from_outside_ends_the_process_too_and_keeps_what_was_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(BENCHMARKS), second="time.sleep(600)", items=ITEMS))
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from pathlib import Path\n"
        "from gpu_check_processes import run_in_processes\n"
        "from gpu_check_report import Check\n"
        f"check = Check(Path({str(tmp_path)!r}), 'cuda', 60.0)\n"
        f"command = [sys.executable, {str(script)!r}, '--out', {str(tmp_path)!r}]\n"
        f"try: run_in_processes(command, {ITEMS!r}, check)\n"
        "finally: (check.out / 'kept').write_text(str(len(check.lines)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as process:
        results = tmp_path / "results.jsonl"
        while not (results.exists() and results.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1

    assert (tmp_path / "kept").read_text() == "1"
    assert json.loads(results.read_text())["name"] == "one"
    assert not Path((tmp_path / "tmp-0").read_text()).exists()


def test_parts_of_an_item_cannot_hide_that_the_device_is_lost(tmp_path, capfd):
    check = Check(tmp_path, "cuda", 60.0, is_lost=lambda: True)
    with pytest.raises(DeviceLost):
        check.attempt(3, "item", lambda: check.attempt(3, "part", lambda: 1 // 0))

    assert check.knows(3, "part")
    assert not check.knows(3, "item")
