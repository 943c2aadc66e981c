"""Why each request ran, waited or was preempted in a step, as the scheduler wrote it down.

A `Decision` is made for every request that schedule() examined; the rest of the waiting
queue, which it never looked at, is covered by one `Behind`. Both are data: the sentence a
person reads is made from them in `lmscope.scope.why`.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Behind", "Code", "Decision", "Outcome"]


class Outcome(enum.StrEnum):
    """What a step did with a request."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"
    PREEMPTED = "preempted"


class Code(enum.StrEnum):
    """The reason behind an outcome; one for each exit of schedule()."""

    # scheduled
    DECODE = "decode"
    PREFILL = "prefill"  # the whole rest of the prompt
    PREFILL_CHUNK = "prefill_chunk"  # a part of it; tokens_left remain
    RESUMED = "resumed"  # back from preemption; computes known tokens again
    # waiting, at the head of the queue or in the running list
    NO_BLOCKS = "no_blocks"  # the pool cannot serve it
    BUDGET = "budget"  # the token budget of the step is spent
    SEATS = "seats"  # max_num_seqs requests run already
    AFTER_PREEMPTION = "after_preemption"  # nobody is admitted in a step that preempts
    CHUNKING_OFF = "chunking_off"  # does not fit the budget in one piece
    LENGTH_LIMIT = "length_limit"  # no room below max_model_len, nothing to compute
    IN_FLIGHT = "in_flight"  # async: tokens on their way already reach max_tokens
    AFTER_SELF_PREEMPTION = "after_self_preemption"  # an earlier one preempted itself
    BEHIND = "behind"  # an earlier one could not be admitted
    # preempted
    PREEMPTED = "preempted"
    PREEMPTED_SELF = "preempted_self"


class Decision(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What schedule() decided about one request, and the quantities it turned on."""

    request_id: str
    outcome: Outcome
    code: Code
    # tokens it could have used in this step; tokens it got; tokens then still to compute
    tokens_wanted: int = 0
    tokens_granted: int = 0
    tokens_left: int = 0
    # of the granted: computed before and lost to a preemption
    tokens_recomputed: int = 0
    # found in the prefix cache by this admission
    tokens_cached: int = 0
    # token budget left when it was examined
    budget_left: int = 0
    # blocks to take from the free queue, hits that lie in it included; blocks in the queue
    blocks_needed: int = 0
    blocks_free: int = 0
    # what made it wait: the request that holds most blocks, took most of the budget,
    # stands in front, or for which it was preempted; and that request's amount
    other_id: str | None = None
    other_amount: int = 0
    # preempted: what it gave up
    blocks_lost: int = 0
    tokens_lost: int = 0


class Behind(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All requests from `first` to `last` of the waiting queue, never examined.

    They wait for the same reason: somebody in front of them did not get in, or the step
    ended before their turn. `code` is that reason; `other_id` names who or what was last
    examined.
    """

    first: str
    last: str
    count: int
    code: Code
    other_id: str | None = None
