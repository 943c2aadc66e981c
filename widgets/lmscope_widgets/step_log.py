"""What each step did, kept for the strip of steps in a still picture, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepBar", "StepLog"]


@dataclass
class StepBar:
    """One step, or several that follow one another.

    Tokens (`decode`, `prefill`, `recompute`, `cached`) and events (`evicted`, `preempted`)
    are sums over `count` steps; `used`, `kept` and `waiting` are the largest of them.
    """

    step: int
    count: int = 1
    decode: int = 0
    prefill: int = 0
    recompute: int = 0
    cached: int = 0
    evicted: int = 0
    preempted: int = 0
    used: int = 0
    kept: int = 0
    waiting: int = 0

    def add(self, other: StepBar) -> None:
        """Take in the steps after these."""
        self.count += other.count
        for name in ("decode", "prefill", "recompute", "cached", "evicted", "preempted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("used", "kept", "waiting"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


class StepLog:
    """All steps since the start in at most `limit` bars.

    When it is full, neighbours are joined and from then on each bar covers twice as many
    steps, so a long run stays visible from its beginning.
    """

    def __init__(self, limit: int = 1024) -> None:
        self.bars: list[StepBar] = []
        self.width = 1
        self._limit = limit

    def put(self, bar: StepBar) -> None:
        """Append one step, after those that are there."""
        if self.bars and self.bars[-1].count < self.width:
            self.bars[-1].add(bar)
        else:
            self.bars.append(bar)
        if len(self.bars) > self._limit:
            self._halve()

    def _halve(self) -> None:
        self.width *= 2
        joined: list[StepBar] = []
        for bar in self.bars:
            if joined and joined[-1].count + bar.count <= self.width:
                joined[-1].add(bar)
            else:
                joined.append(bar)
        self.bars = joined
