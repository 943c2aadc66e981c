"""What the fold counts, and what it says has changed."""

from __future__ import annotations

import msgspec

__all__ = ["Changes", "Eviction", "StepCounts", "Totals"]


class Eviction(msgspec.Struct, frozen=True, gc=False):
    """Content that a block lost: whose it was, from which step, and for whom it had to go."""

    block_id: int
    block_hash: int
    stored_by: str | None
    stored_step: int
    for_request_id: str


class StepCounts(msgspec.Struct):
    """The last step in tokens, except where it says otherwise.

    scheduled     prefill + decode + recomputed
    recomputed    computed before, and given up by a preemption
    cached        found in the prefix cache by this step's admissions; they cost nothing
    output        sampled
    preemptions   requests
    started       time of the SchedulerOutput, engine clock
    duration_s    from there to the EngineCoreOutputs; None before
    device_duration_s   what of it a GPU worked on the step, by its own clock; None before the
                  ModelRunnerOutput, and where nobody timed it, as on a CPU

    With overlapping steps `output` and both durations are of the step before, which ends within
    this one.
    """

    step: int = 0
    scheduled: int = 0
    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    cached: int = 0
    output: int = 0
    preemptions: int = 0
    started: float = 0.0
    duration_s: float | None = None
    device_duration_s: float | None = None


class Totals(msgspec.Struct):
    """Counts since the view began.

    prompt_tokens, cached_tokens   of each request once, at its first admission: the tokens
                                   of its prompt, and those the prefix cache had
    hits, evictions                blocks
    recomputed_tokens              scheduled again after a preemption
    """

    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    hits: int = 0
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


class Changes:
    """Ids of what changed since the reader who holds this last emptied it.

    An id of `requests` that a view does not list any more has been dropped from the list.
    """

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.requests: set[str] = set()

    def clear(self) -> None:
        self.blocks.clear()
        self.requests.clear()
