"""PromptLogprobs: log probabilities of a prompt's tokens, gathered chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor

from lmscope.boundary import LogprobsLists

__all__ = ["PromptLogprobs"]

# Rows whose log probabilities are worked out at once, so that they stay in the cache.
_ROWS_AT_ONCE = 64


class PromptLogprobs:
    """What is known of one prompt; position p of it predicts the token at p + 1.

    k         columns beside the token's own; -1: the whole vocabulary
    gather    makes them of logits: `prompt_logprobs` of a Sampler
    """

    def __init__(
        self,
        prompt_token_ids: tuple[int, ...],
        k: int,
        gather: Callable[[Tensor, Sequence[int], int], LogprobsLists],
    ) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._k = k
        self._gather = gather
        self._parts: list[LogprobsLists] = []
        self._num_done = 0

    def num_rows(self, first: int, num_tokens: int) -> int:
        """Of the tokens computed from position `first` on, how many predict a prompt token."""
        return max(0, min(first + num_tokens, len(self._prompt_token_ids) - 1) - first)

    def add(self, first: int, logits: Tensor) -> None:
        """Take in the logits of positions `first` and on, [N, V].

        Position 0 begins anew, which happens when a request is preempted in its prompt.
        """
        if first == 0:
            self._parts.clear()
            self._num_done = 0
        assert first == self._num_done, "a prompt with log probabilities skips the prefix cache"
        targets = self._prompt_token_ids[first + 1 : first + 1 + len(logits)]
        for start in range(0, len(targets), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            self._parts.append(self._gather(logits[rows], targets[rows], self._k))
        self._num_done += len(targets)

    def result(self) -> LogprobsLists:
        """One row for each prompt token but the first, which nothing predicts."""
        assert self._num_done == len(self._prompt_token_ids) - 1
        return LogprobsLists(
            tuple(chain.from_iterable(part.logprob_token_ids for part in self._parts)),
            tuple(chain.from_iterable(part.logprobs for part in self._parts)),
            tuple(chain.from_iterable(part.sampled_token_ranks for part in self._parts)),
        )
