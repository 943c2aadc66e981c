"""What a request changes in its logits before the most likely token is looked for.

In vLLM's order: allowed tokens, bad words, min_tokens, logit_bias, then the repetition,
frequency and presence penalties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lmscope.execute.sampling_row import SamplingRow

__all__ = ["LogitsAdjustment"]

_FLOAT32 = torch.finfo(torch.float32)


class LogitsAdjustment:
    """The changes that one request makes to its row of logits.

    What stays the same from step to step is a tensor here; what depends on the output so
    far is read from the live list each time, at a cost that grows with its length.
    """

    def __init__(self, row: SamplingRow, vocab_size: int, device: torch.device) -> None:
        params = row.params
        self._row = row
        self._vocab_size = vocab_size
        self._device = device
        self._stop_ids = self._known(row.stop_ids) if params.min_tokens else []
        self._bad_words = [
            word for word in row.bad_words_ids if word and 0 <= word[-1] < vocab_size
        ]
        self._allowed = (
            None
            if params.allowed_token_ids is None
            else self._ids(self._known(params.allowed_token_ids))
        )
        bias = {
            token: _finite(value)
            for token, value in (params.logit_bias or {}).items()
            if token < vocab_size
        }
        self._bias_ids = self._ids(bias)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        # A factor that float32 cannot hold would become 0 or infinite.
        self._repetition = max(_finite(params.repetition_penalty), _FLOAT32.tiny)
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._has_penalty = (self._repetition, self._frequency, self._presence) != (1.0, 0.0, 0.0)
        self._prompt = (
            frozenset(self._known(row.prompt_token_ids)) if self._repetition != 1.0 else frozenset()
        )
        self._prompt_ids = self._ids(self._prompt)

    @staticmethod
    def is_needed(row: SamplingRow) -> bool:
        """Whether this request will ever change its logits."""
        params = row.params
        return bool(
            params.allowed_token_ids is not None
            or row.bad_words_ids
            or params.min_tokens
            or params.logit_bias
            or (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            != (1.0, 0.0, 0.0)
        )

    def is_due(self) -> bool:
        """Whether this step's logits change at all."""
        return bool(
            self._allowed is not None
            or self._bad_words
            or self._must_go_on()
            or len(self._bias)
            or self._has_penalty
        )

    def apply(self, logits: Tensor) -> None:
        """Change one row of logits, [V] float32, in place."""
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(-math.inf)
            logits[self._allowed] = kept
        barred = self._completing_tokens()
        if self._must_go_on():
            barred += self._stop_ids
        if barred:
            logits[self._ids(barred)] = -math.inf
        if len(self._bias):
            logits[self._bias_ids] += self._bias
        if self._has_penalty:
            self._penalise(logits)

    def _must_go_on(self) -> bool:
        is_short = len(self._row.output_token_ids) < self._row.params.min_tokens
        return is_short and bool(self._stop_ids)

    def _completing_tokens(self) -> list[int]:
        """The last tokens of the bad words whose other tokens have just been sampled."""
        output = self._row.output_token_ids
        return [word[-1] for word in self._bad_words if _ends_with(output, word[:-1])]

    def _penalise(self, logits: Tensor) -> None:
        counts = Counter(self._row.output_token_ids)
        if self._repetition != 1.0:
            # Once for each token, whether in the prompt, the output or both.
            self._repel(logits, self._prompt_ids)
            self._repel(logits, self._ids([token for token in counts if token not in self._prompt]))
        if counts and (self._frequency or self._presence):
            ids = self._ids(counts)
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=self._device)
            logits[ids] = logits[ids] - self._frequency * times - self._presence

    def _repel(self, logits: Tensor, ids: Tensor) -> None:
        values = logits[ids]
        logits[ids] = torch.where(values > 0, values / self._repetition, values * self._repetition)

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        """Those that have a logit: a tokenizer may know ids that the model does not."""
        return [token for token in token_ids if 0 <= token < self._vocab_size]

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(token_ids), dtype=torch.int64, device=self._device)


def _ends_with(tokens: Sequence[int], tail: tuple[int, ...]) -> bool:
    return not tail or tuple(tokens[-len(tail) :]) == tail


def _finite(value: float) -> float:
    """`value` within float32, so that a barred token's -inf never meets an infinity."""
    return min(max(value, -_FLOAT32.max), _FLOAT32.max)
