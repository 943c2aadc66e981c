"""What the requests and blocks of a recording have been through, as History collects it.

Moments (`at`, `stored_at`, `removed_at`) count events and look-ups, so that what happens
within one step has an order; 0 is the snapshot with which the recording begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmscope.scope.request_view import RequestView

__all__ = ["Copy", "Hit", "Life", "Seating"]

Hit = tuple[int, str | None, int]
"""A block that came from the cache, the request that had filled it, and in which step."""


@dataclass(slots=True)
class Copy:
    """A block that could be found under a name, from one moment to another.

    name   the hash of its content and of all before it
    how    "" while it can be found; then "evicted", "dropped" or "cleared"
    """

    name: int
    block_id: int
    stored_by: str | None
    stored_step: int
    stored_at: int
    removed_at: int | None = None
    removed_step: int = 0
    removed_for: str | None = None
    how: str = ""

    def is_there(self, at: int) -> bool:
        """Whether it could be found at that moment."""
        return self.stored_at < at and (self.removed_at is None or self.removed_at > at)

    def is_gone(self, at: int) -> bool:
        """Whether it had been there, and was no more at that moment."""
        return self.removed_at is not None and self.removed_at < at


@dataclass(slots=True)
class Seating:
    """One admission of a request.

    step         None for one before the recording began
    num_tokens   that it had then, prompt and output
    at           the moment of its look-up
    chunks       step, start and end of what was computed of those tokens
    """

    step: int | None
    is_resumed: bool
    num_tokens: int
    at: int = 0
    hits: list[Hit] = field(default_factory=list)
    chunks: list[tuple[int | None, int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Life:
    """One request from its arrival to its end; an id that comes again begins another life.

    seatings       its admissions, oldest first
    was_admitted   before the recording began; that is among its seatings only where it was
                   the first and still lasted
    ended_at       the moment at which the engine said that it was finished
    prefixes       a number for its tokens up to the end of each block; see ContentHistory
    """

    record: RequestView
    seatings: list[Seating] = field(default_factory=list)
    was_admitted: bool = False
    ended_at: int | None = None
    prefixes: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def cache_salt(self) -> str | None:
        return self.record.request.cache_salt
