"""Why each request ran, waited or was preempted in a step, as the scheduler wrote it down.

A `Decision` is made for every request that schedule() examined; the rest of the waiting
queue, which it never looked at, is covered by one `Behind`. A `PrefixMiss` says the same of
the prefix cache: why it did not have the rest of a prompt. All are data: the sentence a person
reads is made from them in `lmscope.scope.why`.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Behind", "Change", "Code", "Decision", "Miss", "Outcome", "PrefixMiss", "PromptMatch"]


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


class Decision(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True):
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


class Behind(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True):
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


class Miss(enum.StrEnum):
    """Why the first token that did not come from the prefix cache did not."""

    NEVER_SEEN = "never_seen"  # no block with these tokens, after these, was ever full
    TAIL_RECOMPUTE = "tail_recompute"  # the block was there; the last token is always computed
    SHORTER_THAN_BLOCK = "shorter_than_block"  # what is left fills no block
    EVICTED = "evicted"  # the block was there once, and had to go
    CLEARED = "cleared"  # the block was there once, until the cache was reset
    OTHER_SALT = "other_salt"  # the same tokens, under another cache_salt only
    LOOKUP_SKIPPED = "lookup_skipped"  # nobody asked the cache; `detail` says why
    UNKNOWN = "unknown"  # it was decided by what lies before the recording


class PromptMatch(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """The earlier request that begins with most of the same tokens, and where they part.

    request_id            of several that match equally far, the first that was there: a prompt
                          from its admission on, an output from its end on
    num_tokens            that are equal, from the start
    token_id, text        the first token that differs, here; None where this one ends
    other_token_id, other_text   the same token there; None where that one ends
    is_other_salt         the two could not share blocks in any case
    is_uncomputed         that one has all tokens of the block that was missed, but had not
                          computed them by then
    """

    request_id: str
    num_tokens: int
    token_id: int | None = None
    text: str = ""
    other_token_id: int | None = None
    other_text: str = ""
    is_other_salt: bool = False
    is_uncomputed: bool = False


class PrefixMiss(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Why the prefix cache did not have the first token that an admission computes."""

    code: Miss
    # position of that token in prompt and output, from 0; all before it came from the cache
    position: int
    # evicted, cleared, other_salt, tail_recompute: the block with these tokens, who had
    # filled it, and in which step; unknown: a block that held them, perhaps after others
    block_id: int | None = None
    stored_by: str | None = None
    stored_step: int = 0
    # when that block lost its content; 0: it had not
    removed_step: int = 0
    # evicted: for whom; None when the content was dropped and nobody needed the block
    other_id: str | None = None
    # never_seen: how far an earlier request was the same; None when no first token was
    match: PromptMatch | None = None
    # never_seen, other_salt, unknown: what came before this step is not in the recording;
    # 0: it has all from the engine's beginning
    since_step: int = 0
    # lookup_skipped: "caching is off", "prompt_logprobs" or "skip_reading_prefix_cache"
    detail: str = ""


class Change(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True):
    """One change to the conditions of a step; all zero is the step as it was.

    blocks     free blocks more, empty ones, the past unchanged
    tokens     token budget more
    seats      requests more that may run at once (max_num_seqs)
    position   place in the waiting queue, 1 is the head; 0 leaves it where it is
    """

    blocks: int = 0
    tokens: int = 0
    seats: int = 0
    position: int = 0
