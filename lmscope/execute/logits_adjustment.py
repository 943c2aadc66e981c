"""What requests change in their logits before the most likely token is looked for.

In vLLM's order: allowed tokens, bad words, min_tokens, logit_bias, then the repetition,
frequency and presence penalties. A barred token is -inf whatever is added to it later, so what is
barred comes last here.

Only tokens that have a bias, or occurred, are looked at. What a token has coming is worked out once
when it occurs, so a step costs a lookup for each new token, and reading what is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from lmscope_kernels.sampling_cpu import Changes
from numpy.typing import NDArray
from torch import Tensor

from lmscope.execute.sampling_row import SamplingRow

__all__ = ["LogitsAdjustment", "adjusted_logits", "changes_of"]

_FLOAT32 = np.finfo(np.float32)
# Columns of an entry, as in Changes.
_BIAS, _REPETITION, _BY_FREQUENCY, _BY_PRESENCE = range(4)
_FEWEST_PLACES = 16


class LogitsAdjustment:
    """The changes that one request makes to its row of logits, kept up while it samples.

    The tokens of its live list that are new are counted at each `update`. Tokens that were counted
    may be taken back; if others are put in their place, which the list does not show, the request
    needs a new SamplingRow and with it a new one of these.
    """

    def __init__(self, row: SamplingRow, vocab_size: int) -> None:
        # Not the row itself, which whoever keeps this by its row would keep for good.
        params = self._params = row.params
        self._prompt = row.prompt_token_ids
        self._output = row.output_token_ids
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        self._stop_ids = self._known(row.stop_ids) if params.min_tokens else []
        words = [word for word in row.bad_words_ids if word and 0 <= word[-1] < vocab_size]
        self._bad_tokens = [word[0] for word in words if len(word) == 1]
        # The longer ones by the token before their last.
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        # A factor that float32 cannot hold would become 0 or infinite.
        self._repetition = max(_finite(params.repetition_penalty), float(_FLOAT32.tiny))
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._has_penalty = _has_penalty(row)
        self.is_only = params.allowed_token_ids is not None
        self._num_seen, self._last_seen = 0, -1
        self._restart()

    @staticmethod
    def is_needed(row: SamplingRow) -> bool:
        """Whether this request will ever change its logits."""
        params = row.params
        return bool(
            params.allowed_token_ids is not None
            or row.bad_words_ids
            or params.min_tokens
            or params.logit_bias
            or _has_penalty(row)
        )

    def update(self) -> None:
        """Count the output tokens that came since the last time."""
        if not self._has_penalty:
            return
        output = self._output
        seen = self._num_seen
        if seen and (len(output) < seen or output[seen - 1] != self._last_seen):
            self._restart()
            seen = 0
        if len(output) > seen:
            for token in output[seen:]:
                self._count(token)
            self._num_seen, self._last_seen = len(output), output[-1]

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens [E] and what each has coming [4, E], as in Changes."""
        count = len(self._places)
        return self._ids[:count], self._columns[:, :count]

    def barred(self) -> Sequence[int]:
        """Tokens that must not come next."""
        output = self._output
        must_go_on = len(output) < self._min_tokens
        words = self._bad_words.get(output[-1]) if self._bad_words and len(output) else None
        if not (must_go_on or words):
            return self._bad_tokens
        completing = [word[-1] for word in words or () if _ends_with(output, word[:-1])]
        return [*self._bad_tokens, *completing, *(self._stop_ids if must_go_on else ())]

    def _restart(self) -> None:
        """As before the first output token."""
        params = self._params
        self._num_seen, self._last_seen = 0, -1
        bias = params.logit_bias or {}
        repeated = self._prompt if self._repetition != 1.0 else ()
        known = self._known([*bias, *repeated] if not self.is_only else params.allowed_token_ids)
        # Place among the entries of each token that has one.
        self._places = {token: place for place, token in enumerate(dict.fromkeys(known))}
        capacity = max(_FEWEST_PLACES, 2 * len(self._places))
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._columns = np.zeros((4, capacity), np.float32)
        self._columns[_REPETITION] = 1.0
        self._counts = np.zeros(capacity, np.float32)
        for token, value in bias.items():
            if token in self._places:
                self._columns[_BIAS, self._places[token]] = _finite(value)
        places = [self._places[token] for token in set(repeated) if token in self._places]
        self._columns[_REPETITION, places] = self._repetition

    def _count(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            if self.is_only or not 0 <= token < self._vocab_size:
                return
            place = self._new_place(token)
        self._counts[place] += 1
        columns = self._columns
        # Once for each token, whether in the prompt, the output or both.
        columns[_REPETITION, place] = self._repetition
        columns[_BY_FREQUENCY, place] = self._frequency * self._counts[place]
        columns[_BY_PRESENCE, place] = self._presence

    def _new_place(self, token: int) -> int:
        place = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            more = np.zeros_like(self._columns)
            more[_REPETITION] = 1.0
            self._columns = np.concatenate((self._columns, more), axis=1)
        self._places[token] = place
        self._ids[place] = token
        return place

    def _known(self, token_ids: Iterable[int] | None) -> list[int]:
        """Those that have a logit: a tokenizer may know ids that the model does not."""
        return [token for token in token_ids or () if 0 <= token < self._vocab_size]


def changes_of(
    adjustments: Sequence[tuple[int, LogitsAdjustment]], num_rows: int
) -> Changes | None:
    """What rows change in this step; None: nothing.

    adjustments    of those rows that have one, with their numbers, ascending
    num_rows       of the whole batch
    """
    ids, columns = [], []
    barred: list[int] = []
    sizes, num_barred = np.zeros((2, num_rows), np.int64)
    is_only = np.zeros(num_rows, np.bool_)
    for row, adjustment in adjustments:
        adjustment.update()
        own_ids, own_columns = adjustment.entries()
        own_barred = adjustment.barred()
        sizes[row], num_barred[row] = len(own_ids), len(own_barred)
        is_only[row] = adjustment.is_only
        ids.append(own_ids)
        columns.append(own_columns)
        barred.extend(own_barred)
    if not (sizes.any() or barred or is_only.any()):
        return None
    return Changes(
        _starts(sizes),
        np.concatenate(ids),
        np.concatenate(columns, axis=1),
        _starts(num_barred),
        np.array(barred, np.int64),
        is_only,
    )


def adjusted_logits(logits: Tensor, changes: Changes | None) -> Tensor:
    """[R, V] float32; `logits` is not changed, but may be what is returned."""
    if changes is None:
        return logits.to(torch.float32)
    device = logits.device
    adjusted = logits.to(torch.float32, copy=True)
    bias, repetition, by_frequency, by_presence = torch.from_numpy(changes.entries).to(device)
    rows, ids = _on(device, _rows_of(changes.entry_starts), changes.entry_ids)
    values = adjusted[rows, ids] + bias
    values = torch.where(values > 0, values / repetition, values * repetition)
    if changes.is_only.any():
        adjusted[_on(device, np.flatnonzero(changes.is_only))[0]] = -math.inf
    adjusted[rows, ids] = values - by_frequency - by_presence
    if len(changes.barred_ids):
        rows, ids = _on(device, _rows_of(changes.barred_starts), changes.barred_ids)
        adjusted[rows, ids] = -math.inf
    return adjusted


def _rows_of(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row of each entry."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def _on(device: torch.device, *arrays: NDArray[np.int64]) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _has_penalty(row: SamplingRow) -> bool:
    params = row.params
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return penalties != (1.0, 0.0, 0.0)


def _ends_with(tokens: Sequence[int], tail: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(tail) :]) == tail


def _finite(value: float) -> float:
    """`value` within float32, so that a barred token's -inf never meets an infinity."""
    return min(max(value, float(_FLOAT32.min)), float(_FLOAT32.max))
