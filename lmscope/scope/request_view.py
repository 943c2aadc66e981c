"""One request as the stream tells it, and the slot that gives it its colour."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from lmscope.boundary import EngineCoreRequest, Logprob
from lmscope.decisions import Decision

__all__ = ["NEUTRAL_SLOT", "NO_SLOT", "OwnerSlots", "RequestView", "TokenArrival", "Work"]

NEUTRAL_SLOT = 254
"""Owner slot of a request that has none of its own."""

NO_SLOT = 255
"""Owner slot of a block that belongs to nobody."""


class TokenArrival(msgspec.Struct, frozen=True, gc=False):
    """How an output token reached the user.

    step, time        of its RequestOutput; seconds on the engine's clock
    logprobs          what the request asked for: the token itself and the most likely ones
    num_preemptions   of its request by then
    """

    step: int
    time: float
    token_id: int
    logprobs: Mapping[int, Logprob] | None = None
    num_preemptions: int = 0


class Work(msgspec.Struct, frozen=True, gc=False):
    """What a request did in `count` steps that follow one another, from `step` on.

    kind     'prefill', 'decode', 'recompute' (computed before and given up), or 'preempted',
             which counts no step
    tokens   computed in each of these steps
    cached   found in the prefix cache by the admission in the first of them
    """

    step: int
    count: int
    kind: str
    tokens: int = 0
    cached: int = 0


@dataclass(slots=True)
class RequestView:
    """A request at one moment. Read it; the view that it comes from changes it.

    status                 'waiting', 'running', 'preempted' or 'finished'
    slot                   owner slot: 0 to 23, or 254 (neutral)
    output_token_ids       all of them, those that a stop string cut off included
    text                   of the output, as far as the user has got it
    num_computed_tokens    with keys and values in its blocks, this step's tokens included
    num_cached_tokens      prefix-cache hits at the first admission; -1 before it
    num_lost_tokens        computed and given up by preemptions, summed
    num_recomputed_tokens  scheduled again after that, summed
    block_ids              its block table
    num_shared_blocks      of these: held by others, too
    max_blocks             the most it held at any time
    finish_reason          'stop', 'length', 'abort', 'error'; None while it lives
    stop_reason            the stop string or stop token id; None for EOS
    ..._step, ..._time     engine step and seconds (engine clock) of its milestones, or None
    arrivals               of the last output tokens: how each reached the user; those that
                           came before the view began are missing at the front
    work                   the steps that computed something for it, and its preemptions;
                           it waited in the steps between
    """

    request: EngineCoreRequest
    slot: int = NEUTRAL_SLOT
    status: str = "waiting"
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1
    num_lost_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0
    max_blocks: int = 0
    first_scheduled_step: int | None = None
    first_scheduled_time: float | None = None
    first_token_step: int | None = None
    first_token_time: float | None = None
    finish_step: int | None = None
    finish_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    arrivals: list[TokenArrival] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    # For the view that folds it. Its last decision of its own:
    decision: Decision | None = None
    # text of each output token whose text is known
    pieces: list[str] = field(default_factory=list)
    # blocks that it made findable
    stored: list[int] = field(default_factory=list)
    # blocks that the events say it holds; the table may lag behind within a step
    num_held: int = 0
    # tokens that were computed, or found, at any time: below this, computing is repeating
    num_reached: int = 0
    # counts arrivals and ends in the order of the stream
    arrival_order: int = 0
    finish_order: int = 0
    # The front end may end a request before the engine lets go of it.
    is_in_engine: bool = True
    # its id was in a SchedulerOutput's finished_req_ids
    is_reported: bool = False
    # the view that may change this object; others copy it first
    owner: object = None

    def copy_for(self, owner: object) -> RequestView:
        other = copy.copy(self)
        other.output_token_ids = self.output_token_ids.copy()
        other.block_ids = self.block_ids.copy()
        other.pieces = self.pieces.copy()
        other.arrivals = self.arrivals.copy()
        other.work = self.work.copy()
        other.stored = self.stored.copy()
        other.owner = owner
        return other

    def add_text(self, text: str, num_tokens: int) -> None:
        """Append what the user got in a step; it belongs to the last of its tokens."""
        self.text += text
        if num_tokens:
            self.pieces.extend([""] * (num_tokens - 1))
            self.pieces.append(text)
        elif text and self.pieces:
            # It was held back for a stop string that did not come.
            self.pieces[-1] += text

    def add_work(self, step: int, kind: str, tokens: int, cached: int = 0) -> None:
        """Say what a step computed; a step like the one before it is counted with it."""
        last = self.work[-1] if self.work else None
        if (
            last is not None
            and not cached
            and (last.kind, last.tokens) == (kind, tokens)
            and last.step + last.count == step
            and last.count
        ):
            self.work[-1] = Work(last.step, last.count + 1, kind, tokens, last.cached)
        else:
            self.work.append(Work(step, 1, kind, tokens, cached))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def prompt(self) -> str | None:
        return self.request.prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int | None:
        return self.request.sampling_params.max_tokens

    @property
    def arrival_step(self) -> int:
        """The last finished step when it arrived."""
        return self.request.step

    @property
    def arrival_time(self) -> float:
        """Seconds on the engine's clock."""
        return self.request.time

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens `start` to `end - 1` of prompt and output together."""
        num_prompt = self.num_prompt_tokens
        outputs = self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return (*self.prompt_token_ids[start:end], *outputs)

    def token_texts(self, start: int = 0, end: int | None = None) -> list[str]:
        """The text of each of these tokens; joined, they give the text.

        A token that is part of a character adds nothing, and neither does one whose text
        nobody told. With stop strings a text may come with a later token than its own.
        """
        end = self.num_tokens if end is None else min(end, self.num_tokens)
        num_prompt = self.num_prompt_tokens
        prompt, offsets = self.request.prompt, self.request.prompt_offsets
        if prompt is None or len(offsets) != num_prompt:
            texts = [""] * (min(end, num_prompt) - start)
        else:
            texts = [
                prompt[offsets[i - 1] if i else 0 : offsets[i]]
                for i in range(start, min(end, num_prompt))
            ]
        pieces = self.pieces[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return texts + pieces + [""] * (end - start - len(texts) - len(pieces))


class OwnerSlots:
    """Which request has which of the 24 owner slots.

    A request takes one when it arrives: in the first ring of eight that has any to give,
    one that nobody had, else the one whose holder ended longest ago and has no kept block
    to show, else the one whose holder ended longest ago.
    """

    NUM_SLOTS = 24
    RING = 8

    def __init__(self) -> None:
        self._holders: list[str | None] = [None] * self.NUM_SLOTS

    def copy(self) -> OwnerSlots:
        other = OwnerSlots()
        other._holders = self._holders.copy()
        return other

    def take(
        self, request_id: str, rest: Callable[[str], tuple[int, int] | None]
    ) -> tuple[int, str | None]:
        """A slot for a request, and whom it was taken from; 254 when all are in use.

        rest   for a holder: None while it lives, else what to compare; the least goes first
        """
        if request_id in self._holders:  # an id that is used again keeps its slot
            return self._holders.index(request_id), None
        for start in range(0, self.NUM_SLOTS, self.RING):
            best: tuple[tuple[int, int], int] | None = None
            for slot in range(start, start + self.RING):
                holder = self._holders[slot]
                rank = (-1, slot) if holder is None else rest(holder)
                if rank is not None and (best is None or (rank, slot) < best):
                    best = rank, slot
            if best is not None:
                slot = best[1]
                previous, self._holders[slot] = self._holders[slot], request_id
                return slot, previous
        return NEUTRAL_SLOT, None

    def release(self, request_id: str) -> None:
        """Give the slot of a request back as one that nobody had."""
        if request_id in self._holders:
            self._holders[self._holders.index(request_id)] = None
