"""Link: how far one page has come with its frames, and what to send it next.

The rules keep an engine free of its viewers: at most five frames are on their way, a page
that is hidden gets two a second, one that has not answered for two seconds gets one a
second, and one that does not answer those either gets nothing until it speaks again.
"""

from __future__ import annotations

import enum

__all__ = ["Link", "Send"]

# A page answers every fourth frame, or half a second later, so that none waits for an answer.
MOST_UNACKNOWLEDGED = 5
ORPHAN_AFTER_S = 2.0
HIDDEN_INTERVAL_S = 0.5
ORPHAN_INTERVAL_S = 1.0
MOST_PROBES = 30
# A run has ended when the engine is idle and nothing has come for this long.
SETTLED_AFTER_S = 0.3


class Send(enum.Enum):
    """What a page gets now."""

    NOTHING = 0
    DELTA = 1
    FULL = 2


class Link:
    """State of one page. Times are seconds of any one clock.

    rate_hz   frames a second at most, while the page answers
    """

    def __init__(self, rate_hz: float) -> None:
        self.rate_hz = rate_hz
        self.is_hidden = False
        self._is_ready = False
        self._wants_full = False
        self._sent_seq = -1
        self._acked_seq = -1
        self._sent_at = float("-inf")
        self._heard_at = float("-inf")
        self._probes = 0
        # Counts of folded structs: at the last frame, and at the last full one.
        self._sent_version = -1
        self._full_version = -1

    # -- from the page ---------------------------------------------------------------

    def hear_ready(self, now: float) -> None:
        """The page has nothing, or lost something: it needs a full frame."""
        self._is_ready = True
        self._wants_full = True
        self._hear(now)
        # Whatever was on its way is of no use any more.
        self._acked_seq = self._sent_seq

    def hear_ack(self, seq: int, is_hidden: bool, now: float) -> None:
        """The page has drawn frame `seq`. One that was never sent is not believed."""
        self._hear(now)
        self.is_hidden = is_hidden
        if self._acked_seq < seq <= self._sent_seq:
            self._acked_seq = seq

    def restart(self) -> None:
        """The stream starts anew: its frames count from 0 again."""
        self._sent_seq = self._acked_seq = -1
        self._sent_version = self._full_version = -1
        self._wants_full = True

    def _hear(self, now: float) -> None:
        self._heard_at = now
        self._probes = 0

    # -- to the page -------------------------------------------------------------------

    def choose(self, now: float, version: int, quiet_since: float | None) -> Send:
        """What to send now.

        version       structs folded so far
        quiet_since   when the last one was folded, if the engine is idle; else None
        """
        if not self._is_ready or now < self._due_at(now):
            return Send.NOTHING
        if self._wants_full:
            return Send.FULL
        if self._settles_at(version, quiet_since) <= now:
            return Send.FULL
        if version == self._sent_version:
            return Send.NOTHING
        return Send.DELTA if self._may_take(now) else Send.NOTHING

    def sent(self, kind: Send, seq: int, version: int, now: float) -> None:
        """A frame has left."""
        if self._is_orphan(now):
            self._probes += 1
        if not self._has_unacknowledged():
            # The page's time to answer begins now and not when it last had to.
            self._heard_at = now
        self._sent_seq, self._sent_at, self._sent_version = seq, now, version
        if kind is Send.FULL:
            self._wants_full = False
            self._full_version = version

    def poll_time(self, now: float) -> float | None:
        """When the page can take what is still to come; None: when it has spoken."""
        if not self._is_ready or not self._may_take(now):
            return None
        return self._due_at(now)

    def next_time(self, now: float, version: int, quiet_since: float | None) -> float | None:
        """When `choose` may answer something else though nothing new has happened."""
        if not self._is_ready:
            return None
        due = self._due_at(now)
        if self._wants_full:
            return due
        times = []
        settles = self._settles_at(version, quiet_since)
        if settles != float("inf"):
            times.append(max(due, settles))
        if version != self._sent_version:
            if self._may_take(now):
                times.append(due)
            elif not self._is_orphan(now):
                times.append(self._heard_at + ORPHAN_AFTER_S)
        return min(times, default=None)

    def _due_at(self, now: float) -> float:
        interval = 1.0 / self.rate_hz
        if self._is_orphan(now):
            interval = max(interval, ORPHAN_INTERVAL_S)
        elif self.is_hidden:
            interval = max(interval, HIDDEN_INTERVAL_S)
        return self._sent_at + interval

    def _settles_at(self, version: int, quiet_since: float | None) -> float:
        """When a run that has ended gets its last full frame; infinity when it has it."""
        if quiet_since is None or version == self._full_version:
            return float("inf")
        return quiet_since + SETTLED_AFTER_S

    def _has_unacknowledged(self) -> bool:
        return self._acked_seq < self._sent_seq

    def _may_take(self, now: float) -> bool:
        if self._sent_seq - self._acked_seq < MOST_UNACKNOWLEDGED:
            return True
        return self._is_orphan(now) and self._probes < MOST_PROBES

    def _is_orphan(self, now: float) -> bool:
        return self._has_unacknowledged() and now - self._heard_at >= ORPHAN_AFTER_S
