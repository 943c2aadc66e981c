"""Rows: the requests of a picture, whole or as what changed since a reader last got them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmscope.boundary import Logprob
from lmscope.scope.request_view import RequestView, TokenArrival, Work

__all__ = ["Row", "Rows", "clean"]

Row = dict[str, Any]

_MAX_PROMPT_TEXT = 120
_MAX_TEXT = 4000
# Tokens at the end of a text that say how they came about, in a full frame.
_MAX_TOKENS = 48
_MAX_TOKENS_FINISHED = 16
# More new ones than this in a delta are told like those of a full frame.
_MOST_ADDED = 256
_MAX_ALTERNATIVES = 4
_MAX_ALTERNATIVE_TEXT = 24
_MAX_WORK = 64
_LETTERS = {"prefill": "p", "decode": "d", "recompute": "r", "preempted": "x"}


@dataclass(slots=True)
class _Sent:
    """What the reader has of a request, beside the fields of its row.

    order    tells the request from an earlier one of the same id
    """

    fields: Row
    order: int
    num_characters: int
    num_tokens: int
    num_work: int
    last_work: Work | None


class Rows:
    """The rows that one reader has."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sent

    @property
    def ids(self) -> set[str]:
        return set(self._sent)

    def state(self, request_id: str) -> str:
        return str(self._sent[request_id].fields["state"])

    def clear(self) -> None:
        self._sent.clear()

    def forget(self, request_id: str) -> None:
        del self._sent[request_id]

    def whole(self, record: RequestView, sentence: str) -> Row:
        """All of a request."""
        fields = _fields(record, sentence)
        self._remember(record, fields)
        most = _MAX_TOKENS_FINISHED if record.is_finished else _MAX_TOKENS
        first = max(0, len(record.arrivals) - most)
        row = {**fields, "text": _tail(record.text, _MAX_TEXT)}
        tokens = _tokens(record, first)
        if tokens:
            row["tokens"] = tokens
        if record.work:
            row["did"] = _work(record.work[-_MAX_WORK:])
        return row

    def changed(self, record: RequestView, sentence: str, step: int) -> Row | None:
        """What the reader lacks of a request in step `step`; None when it lacks nothing."""
        sent = self._sent.get(record.request_id)
        if sent is None or sent.order != record.arrival_order:
            return self.whole(record, sentence)
        fields = _fields(record, sentence)
        changed = {name: value for name, value in fields.items() if value != sent.fields[name]}
        added = record.text[sent.num_characters :]
        if len(added) > _MAX_TEXT or len(record.arrivals) - sent.num_tokens > _MOST_ADDED:
            return self.whole(record, sentence)
        if added:
            changed["add"] = clean(added)
        tokens = _tokens(record, sent.num_tokens)
        if tokens:
            changed["tokens"] = tokens
        work = record.work
        if (len(work), work[-1] if work else None) != (sent.num_work, sent.last_work) and not (
            "computed" in changed and _goes_on(work, sent, step)
        ):
            first = max(0, sent.num_work - 1)
            # The reader drops what it has from the step of the first one on.
            while first and work[first - 1].step == work[first].step:
                first -= 1
            changed["did"] = _work(work[first:])
        self._remember(record, fields)
        return {"id": record.request_id, **changed} if changed else None

    def _remember(self, record: RequestView, fields: Row) -> None:
        self._sent[record.request_id] = _Sent(
            fields,
            record.arrival_order,
            len(record.text),
            len(record.arrivals),
            len(record.work),
            record.work[-1] if record.work else None,
        )


def clean(text: str) -> str:
    """The same text, without halves of characters, which no message can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _fields(record: RequestView, sentence: str) -> Row:
    first = record.first_scheduled_step
    return {
        "id": record.request_id,
        "slot": record.slot,
        "state": record.status,
        "why": clean(sentence),
        "prompt": record.num_prompt_tokens,
        "cached": max(0, record.num_cached_tokens),
        "computed": record.num_computed_tokens,
        "output": record.num_output_tokens,
        "lost": record.num_lost_tokens,
        "max": record.max_tokens,
        "blocks": len(record.block_ids),
        "shared": record.num_shared_blocks,
        "preemptions": record.num_preemptions,
        "arrived": record.arrival_step,
        "ended": record.finish_step,
        "waited": None if first is None else max(0, first - record.arrival_step - 1),
        "prompt_text": _tail(record.prompt or "", _MAX_PROMPT_TEXT),
    }


def _tokens(record: RequestView, first: int) -> list[list[Any]]:
    """The output tokens from `first` on, of those whose arrival is known."""
    arrivals = record.arrivals
    if first >= len(arrivals):
        return []
    # What came before the view began has a text, but nobody knows how it came about.
    offset = len(record.pieces) - len(arrivals)
    before = arrivals[first - 1] if first else None
    made = []
    for place in range(first, len(arrivals)):
        arrival = arrivals[place]
        started = record.arrival_time if offset == place == 0 else None
        made.append(_token(record.pieces[offset + place], arrival, before, started))
        before = arrival
    return made


def _token(
    piece: str, arrival: TokenArrival, before: TokenArrival | None, started: float | None
) -> list[Any]:
    """Length in UTF-16 units, step, ms; where there is more, chance, alternatives and stall."""
    since = started if before is None else before.time
    ms = None if since is None else round(1000 * max(0.0, arrival.time - since), 1)
    stall = 0
    if before is not None and arrival.num_preemptions > before.num_preemptions:
        stall = max(0, arrival.step - before.step - 1)
    token: list[Any] = [_utf16_length(piece), arrival.step, ms]
    if arrival.logprobs is not None:
        token += _chances(arrival.token_id, arrival.logprobs)
    elif stall:
        token += [None, None]
    return [*token, stall] if stall else token


def _chances(token_id: int, logprobs: Mapping[int, Logprob]) -> list[Any]:
    """The chance of the token, and [text, chance] of the most likely others."""
    own = logprobs.get(token_id)
    others = sorted(
        ((other.logprob, i) for i, other in logprobs.items() if i != token_id), reverse=True
    )
    alternatives = [
        [_alternative(i, logprobs[i]), _chance(logprob)]
        for logprob, i in others[:_MAX_ALTERNATIVES]
    ]
    return [None if own is None else _chance(own.logprob), alternatives]


def _alternative(token_id: int, logprob: Logprob) -> str:
    text = logprob.decoded_token
    return f"#{token_id}" if text is None else clean(text[:_MAX_ALTERNATIVE_TEXT])


def _chance(logprob: float) -> float:
    chance = math.exp(min(0.0, logprob)) if logprob == logprob else 0.0
    return round(chance, 3)


def _utf16_length(text: str) -> int:
    if text.isascii():
        return len(text)
    return len(clean(text).encode("utf-16-le")) // 2


def _goes_on(work: list[Work], sent: _Sent, step: int) -> bool:
    """Whether the reader can tell by itself: the last entry reaches to this step, no more."""
    last, known = work[-1], sent.last_work
    return (
        known is not None
        and len(work) == sent.num_work
        and last.step == known.step
        and last.step + last.count - 1 == step
    )


def _work(work: list[Work]) -> list[list[Any]]:
    """Step, number of steps, letter and tokens of each; then those from the cache, if any."""
    return [
        [
            one.step,
            one.count,
            _LETTERS[one.kind],
            one.tokens,
            *((one.cached,) if one.cached else ()),
        ]
        for one in work
    ]


def _tail(text: str, length: int) -> str:
    return clean(text[-length:])
