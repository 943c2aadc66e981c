"""Provenance: where each token of a request came from, and why the first miss missed.

`recording.provenance(request_id)` answers for every admission of a request: which tokens the
prefix cache had, in whose blocks, computed when; which were computed, in which steps; and why
the first of those was not in the cache. The answer is data; printed it is a few sentences, in
a notebook a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from lmscope.decisions import Miss, PrefixMiss, PromptMatch
from lmscope.errors import RecordingError
from lmscope.scope.history import History
from lmscope.scope.lives import Copy, Hit, Life, Seating
from lmscope.scope.plain_table import plain_table
from lmscope.scope.prefix_miss import sure_miss
from lmscope.scope.why import missed

__all__ = ["Admission", "Provenance", "TokenRange", "provenance_of"]


class TokenRange(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """Tokens `start` to `end - 1` of prompt and output, which have one origin.

    source       "cache": taken from block `block_id`, which `stored_by` filled in step
                 `stored_step`; "computed": in step `step`; "not_computed": not by the end of
                 this admission, or of the recording
    text         of these tokens; "" where it is not known
    """

    start: int
    end: int
    source: str
    step: int | None = None
    block_id: int | None = None
    stored_by: str | None = None
    stored_step: int = 0
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Admission(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """What a request got from the cache when it was admitted, and what it had to compute.

    kind     "new", or "resumed" after a preemption; then its output so far counts as well
    step     None for an admission before the recording began
    ranges   of all tokens that it had then, in order: one per block from the cache, one per
             step that computed
    miss     why the first token that was not in the cache was not
    """

    kind: str
    step: int | None
    ranges: tuple[TokenRange, ...]
    miss: PrefixMiss

    @property
    def num_tokens(self) -> int:
        return self.ranges[-1].end

    @property
    def num_cached(self) -> int:
        """Tokens that came from the cache."""
        return self.miss.position

    @property
    def tokens(self) -> tuple[TokenRange, ...]:
        """For each token the range that it is in."""
        return tuple(part for part in self.ranges for _ in range(part.num_tokens))


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """The answer to: where did this request's tokens come from?

    admissions   the first, and one for each time it came back from preemption
    since_step   when it had been admitted before the recording began: the first step that is
                 in it; else 0
    """

    request_id: str
    num_prompt_tokens: int
    admissions: tuple[Admission, ...]
    since_step: int = 0

    @property
    def tokens(self) -> tuple[TokenRange, ...]:
        """For each prompt token, where it came from at first; empty before that."""
        return self.admissions[0].tokens if self.admissions else ()

    @property
    def miss(self) -> PrefixMiss | None:
        """Why the first token that was not in the cache at first was not."""
        return self.admissions[0].miss if self.admissions else None

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in words: the first admission, and the last one if there were others."""
        told = []
        if self.admissions:
            first, *others = self.admissions
            step = "an earlier step" if first.step is None else f"step {first.step}"
            told.append(f"Request {self.request_id}, {step}: {_from_cache(first)}.")
            told.append(f"It {missed(first.miss)}.")
            if others:
                last = others[-1]
                often = f"{len(others)} times, at last in" if len(others) > 1 else "in"
                told.append(
                    f"Resumed {often} step {last.step} with {last.num_cached} of "
                    f"{last.num_tokens} tokens from the cache, and {missed(last.miss)}."
                )
        else:
            there = " in this recording" if self.since_step else ""
            told.append(f"Request {self.request_id} was not admitted{there}.")
        if self.since_step:
            told.append(f"Steps before {self.since_step} are not in this recording.")
        return tuple(told)

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def _repr_html_(self) -> str:
        columns = ("admission", "tokens", "source", "block", "stored by", "in step", "text")
        rows = [
            (
                f"{admission.kind} {'–' if admission.step is None else admission.step}",
                _span(part),
                part.source.replace("_", " "),
                part.block_id,
                part.stored_by,
                part.stored_step if part.source == "cache" else part.step,
                part.text,
            )
            for admission in self.admissions
            for part in admission.ranges
        ]
        return plain_table(self.sentences, columns, rows)


def provenance_of(history: History, request_id: str) -> Provenance:
    """The answer for one request; of an id that came again, for the last one.

    RecordingError for an id that is not in the recording, naming those that are.
    """
    lives = history.lives.get(request_id)
    if not lives:
        ids = list(history.lives)
        known = ", ".join(ids[:8]) or "none"
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        raise RecordingError(
            f"request id is {request_id!r}, which is not in this recording; known: {known}{more}"
        )
    life = lives[-1]
    return Provenance(
        request_id,
        life.record.num_prompt_tokens,
        tuple(_admission(history, life, seating) for seating in life.seatings),
        since_step=history.since_step if life.was_admitted else 0,
    )


# -- one admission ---------------------------------------------------------------------------


def _admission(history: History, life: Life, seating: Seating) -> Admission:
    return Admission(
        "resumed" if seating.is_resumed else "new",
        seating.step,
        (*_cached(history, life, seating.hits), *_computed(life, seating, history.info.block_size)),
        _miss(history, life, seating),
    )


def _cached(history: History, life: Life, hits: Sequence[Hit]) -> list[TokenRange]:
    size = history.info.block_size
    return [
        TokenRange(
            index * size,
            (index + 1) * size,
            "cache",
            block_id=block_id,
            stored_by=stored_by,
            stored_step=stored_step,
            text=_text(life, index * size, (index + 1) * size),
        )
        for index, (block_id, stored_by, stored_step) in enumerate(hits)
    ]


def _computed(life: Life, seating: Seating, block_size: int) -> Iterator[TokenRange]:
    end = len(seating.hits) * block_size
    for step, start, end in seating.chunks:
        yield TokenRange(start, end, "computed", step, text=_text(life, start, end))
    if end < seating.num_tokens:
        text = _text(life, end, seating.num_tokens)
        yield TokenRange(end, seating.num_tokens, "not_computed", text=text)


def _text(life: Life, start: int, end: int) -> str:
    return "".join(life.record.token_texts(start, end))


# -- the miss --------------------------------------------------------------------------------


def _miss(history: History, life: Life, seating: Seating) -> PrefixMiss:
    """Why the first token that was not in the cache was not."""
    position = len(seating.hits) * history.info.block_size
    params = life.record.request.sampling_params
    sure = sure_miss(history.info, params, seating.num_tokens, position)
    if sure is not None:
        return sure
    if seating.step is None:
        return PrefixMiss(Miss.UNKNOWN, position, since_step=history.since_step)
    index = position // history.info.block_size
    copies = history.content.copies(life, index)
    copies = [copy for copy in copies if copy.stored_at < seating.at]
    there = next((copy for copy in copies if copy.is_there(seating.at)), None)
    if there is not None:
        return _of_copy(Miss.TAIL_RECOMPUTE, position, there)
    if copies:
        last = _lost_last(copies)
        code = Miss.CLEARED if last.how == "cleared" else Miss.EVICTED
        return _of_copy(code, position, last, seating.at)
    return _first_of_its_kind(history, life, seating, position)


def _first_of_its_kind(history: History, life: Life, seating: Seating, position: int) -> PrefixMiss:
    """A miss of content that no block is known to have carried before."""
    content, since_step = history.content, history.since_step
    end = position + history.info.block_size
    # The last block was not looked up, so what lies there may be it.
    is_tail = end == seating.num_tokens
    perhaps = [
        copy
        for copy in content.of_unknown_past(life.record.token_ids(position, end))
        if is_tail or copy.is_gone(seating.at)
    ]
    if perhaps:
        unsure = _of_copy(Miss.UNKNOWN, position, _lost_last(perhaps), seating.at)
        return msgspec.structs.replace(unsure, since_step=since_step)
    others = content.copies_under_other_salts(life, position // history.info.block_size)
    others = [copy for copy in others if copy.stored_at < seating.at]
    if others:
        there = next((copy for copy in others if copy.is_there(seating.at)), None)
        miss = _of_copy(Miss.OTHER_SALT, position, there or _lost_last(others), seating.at)
        return msgspec.structs.replace(miss, since_step=since_step)
    match = _match(history, life, seating, end)
    return PrefixMiss(Miss.NEVER_SEEN, position, match=match, since_step=since_step)


def _lost_last(copies: Sequence[Copy]) -> Copy:
    return max(copies, key=lambda copy: copy.removed_at or 0)


def _of_copy(code: Miss, position: int, copy: Copy, at: int | None = None) -> PrefixMiss:
    """A miss that one block explains; with `at`, and how it had lost its content by then."""
    is_gone = at is not None and copy.is_gone(at)
    return PrefixMiss(
        code,
        position,
        block_id=copy.block_id,
        stored_by=copy.stored_by,
        stored_step=copy.stored_step,
        removed_step=copy.removed_step if is_gone else 0,
        other_id=copy.removed_for if is_gone else None,
    )


def _match(history: History, life: Life, seating: Seating, block_end: int) -> PromptMatch | None:
    """How far an earlier request was the same.

    block_end   where the block that was missed ends
    """
    mine = life.record.token_ids(0, seating.num_tokens)
    found = history.prompts.longest(mine, before=seating.at, other_than=life)
    if found is None:
        return None
    other, count = found
    # Its output was not there to be compared before it had ended.
    is_over = other.ended_at is not None and other.ended_at < seating.at
    is_known = count < other.record.num_prompt_tokens or is_over
    theirs = other.record.token_ids(count, count + 1) if is_known else ()
    return PromptMatch(
        other.request_id,
        count,
        mine[count] if count < len(mine) else None,
        _text(life, count, count + 1) if count < len(mine) else "",
        theirs[0] if theirs else None,
        _text(other, count, count + 1) if theirs else "",
        is_other_salt=other.cache_salt != life.cache_salt,
        is_uncomputed=count >= block_end,
    )


# -- words -----------------------------------------------------------------------------------


def _from_cache(admission: Admission) -> str:
    if not admission.num_cached:
        return f"none of {admission.num_tokens} tokens came from the cache"
    num_cached = f"{admission.num_cached} of {admission.num_tokens} tokens"
    return f"{num_cached} came from the cache, {_sources(admission)}"


def _sources(admission: Admission) -> str:
    """Whose blocks, in runs of those that one request filled in one step."""
    cached = [part for part in admission.ranges if part.source == "cache"]
    runs = []
    for (stored_by, step), parts in groupby(cached, key=lambda p: (p.stored_by, p.stored_step)):
        ids = [part.block_id for part in parts]
        blocks = f"block {ids[0]}" if len(ids) == 1 else f"blocks {_listed(ids, 6)}"
        runs.append(f"{blocks} that {stored_by} filled in step {step}")
    return _listed(runs, 3)


def _listed(items: Sequence[object], most: int) -> str:
    """The items in one phrase; beyond `most` of them how many more there are."""
    *front, last = [str(item) for item in items]
    if len(items) > most:
        front, last = front[:most], f"{len(items) - most} more"
    return f"{', '.join(front)} and {last}" if front else last


def _span(part: TokenRange) -> str:
    if part.num_tokens == 1:
        return str(part.start)
    return f"{part.start} to {part.end - 1}"
