"""What the items of gpu_check.py write down: measurements, verdicts, and the table of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

__all__ = ["Check", "DeviceLost", "Measurement", "is_noise", "summary"]


class DeviceLost(BaseException):  # no Exception: parts of an item must not catch it
    """The device answers to nothing any more in this process, as after an illegal access."""


@dataclass(frozen=True)
class Measurement:
    """One quantity, measured twice.

    values           the two measurements, in `unit`
    floor            what the device allows, worked out from its measured ceilings; None: not known
    goal             what counts as passed; None: shown only
    is_more_better   of tokens a second, say, where the goal is a least and not a most
    """

    item: int
    name: str
    unit: str
    values: tuple[float, float]
    floor: float | None = None
    goal: float | None = None
    is_more_better: bool = False
    note: str = ""

    @property
    def value(self) -> float:
        return sum(self.values) / 2

    @property
    def spread(self) -> float:
        return abs(self.values[0] - self.values[1])

    @property
    def verdict(self) -> str:
        """pass, miss, or noise where the goal lies between the two measurements."""
        if self.goal is None:
            return ""
        met = [v >= self.goal if self.is_more_better else v <= self.goal for v in self.values]
        return "noise" if met[0] != met[1] else "pass" if met[0] else "miss"


@dataclass
class Check:
    """One run of the script: where it runs, how long it may, and what it has found so far.

    device        "cuda", or "cpu" for a dry run
    ceilings      of item 1: bytes a second of a copy, and float operations a second
    is_lost       whether the device answers to nothing any more
    """

    out: Path
    device: str
    budget_s: float
    started: float = field(default_factory=time.monotonic)
    ceilings: dict[str, float] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    is_lost: Callable[[], bool] = lambda: False

    def take_up(self) -> None:
        """Go on where an earlier process of the same run has ended, by what it wrote."""
        file = self.out / "results.jsonl"
        text = file.read_text() if file.exists() else ""
        if text and not text.endswith("\n"):
            # The process was killed in this line.
            with file.open("a") as end:
                end.write("\n")
        for each_line in text.splitlines():
            try:
                line = json.loads(each_line)
            except ValueError:
                continue
            self.lines.append(line)
            if "ceilings" in line:
                self.ceilings = line["ceilings"]
            elif "values" in line:
                names = {each.name for each in fields(Measurement)}
                own = {name: value for name, value in line.items() if name in names}
                measurement = Measurement(**{**own, "values": tuple(own["values"])})
                # An item that was begun anew has measured some of it twice.
                own_place = measurement.item, measurement.name
                self.measurements = [
                    *(each for each in self.measurements if (each.item, each.name) != own_place),
                    measurement,
                ]

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def measured(self, measurement: Measurement) -> None:
        if self.is_dry:
            # Goals are of real sizes on a real device.
            measurement = replace(measurement, goal=None)
        self.measurements.append(measurement)
        self.write(
            item=measurement.item,
            name=measurement.name,
            unit=measurement.unit,
            values=measurement.values,
            floor=measurement.floor,
            goal=measurement.goal,
            is_more_better=measurement.is_more_better,
            verdict=measurement.verdict,
            note=measurement.note,
        )

    def knows(self, item: int, name: str) -> bool:
        """Whether a line says something of it already."""
        return any(line["item"] == item and line["name"] == name for line in self.lines)

    def found(self, item: int, name: str, is_right: bool, note: str = "") -> None:
        """A statement that is true or not: a kernel is right, two results are equal."""
        self.write(item=item, name=name, verdict="pass" if is_right else "FAIL", note=note)

    def skipped(self, item: int, name: str, why: str) -> None:
        self.write(item=item, name=name, verdict="skipped", note=why)

    def write(self, **line: Any) -> None:
        """One line of results.jsonl, on the disk when this returns: a cut run keeps it."""
        self.lines.append(line)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def fits(self, item: int, name: str, estimate_s: float, kept_s: float = 0.0) -> bool:
        """Whether something that takes so long may start; says so where it may not.

        kept_s    what must be left for others after it
        """
        if estimate_s + kept_s <= self.left_s:
            return True
        kept = f", of which {kept_s:.0f} s are for what comes after it" if kept_s else ""
        self.skipped(
            item,
            name,
            f"takes about {estimate_s:.0f} s, {max(self.left_s, 0):.0f} s are left{kept}",
        )
        return False

    def attempt(self, item: int, name: str, action: Callable[[], None]) -> None:
        """Run a part whose failure must not take the others with it; not one that has failed.

        DeviceLost where no other part could run after it in this process.
        """
        if self.knows(item, name):
            return
        try:
            action()
        # Whatever goes wrong in one part, a launch or a model, the time on the device is short
        # and the other parts are still worth having. It is written down as a failure.
        except Exception as error:
            self.found(item, name, False, f"{type(error).__name__}: {str(error)[:600]}")
            if self.is_lost():
                raise DeviceLost from error

    @property
    def num_failed(self) -> int:
        return sum(line.get("verdict") == "FAIL" for line in self.lines)


def is_noise(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two quantities, each measured twice, differ by less than they spread."""
    difference = abs(sum(first) / len(first) - sum(second) / len(second))
    return difference < max(max(first) - min(first), max(second) - min(second))


def summary(check: Check, environment: dict[str, Any]) -> str:
    """Markdown: the run, what failed or did not run, and each measurement beside its floor."""
    where = environment.get("device", check.device)
    lines = [
        f"# gpu_check on {where}, {environment.get('date', '')}",
        "",
        *(["A dry run: torch references, tiny sizes, no figure here says anything.", ""]
          if check.is_dry else []),
    ]  # fmt: skip
    statements = [line for line in check.lines if "values" not in line and "verdict" in line]
    for verdict in ("FAIL", "skipped"):
        some = [line for line in statements if line["verdict"] == verdict]
        lines += [f"- {verdict}: item {s['item']}, {s['name']}: {s['note']}" for s in some]
    num_right = sum(line["verdict"] == "pass" for line in statements)
    lines += [
        f"- {num_right} of {len(statements)} statements hold",
        "",
        "| item | measured | value | ± | unit | floor | ratio | goal | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in check.measurements:
        ratio = _ratio(each)
        lines.append(
            f"| {each.item} | {each.name} | {each.value:.4g} | {each.spread / 2:.2g} "
            f"| {each.unit} | {_number(each.floor)} | {ratio} | {_number(each.goal)} "
            f"| {each.verdict or each.note} |"
        )
    return "\n".join(lines) + "\n"


def _ratio(each: Measurement) -> str:
    """The floor as a part of what was measured, or the other way round: at most 1 either way."""
    if not each.floor or not each.value:
        return ""
    part = each.value / each.floor if each.is_more_better else each.floor / each.value
    return f"{part:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
