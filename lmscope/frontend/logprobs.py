"""LogprobsProcessor: columns of numbers become log probabilities with text, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from lmscope.boundary import EngineCoreRequest, Logprob, LogprobsLists
from lmscope.frontend.tokenizer import REPLACEMENT, TokenizerAdapter, TokenTexts

__all__ = ["LogprobsProcessor"]


class LogprobsProcessor:
    """Turns the log probabilities of one request into what its user gets.

    Each position is a mapping from token id to Logprob: the token itself first, then the
    most likely ones with ranks from 1, so k or k + 1 entries.

    num_logprobs         k of the output; -1: all that there are
    num_prompt_logprobs  k of the prompt
    texts                of the tokens, special ones included; None: no text at all
    cumulative_logprob   of the sampled tokens so far; None when they were not asked for
    """

    def __init__(
        self,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        texts: TokenTexts | None,
    ) -> None:
        self.cumulative_logprob = None if num_logprobs is None else 0.0
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._texts = texts
        self._last_token_id: int | None = None

    @classmethod
    def for_request(
        cls, tokenizer: TokenizerAdapter | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """A processor with the text of `tokenizer`, unless the request wants none."""
        params = request.sampling_params
        return cls(
            params.logprobs,
            params.prompt_logprobs,
            tokenizer.token_texts[False] if tokenizer is not None and params.detokenize else None,
        )

    def update_sample(self, lists: LogprobsLists) -> tuple[dict[int, Logprob], ...]:
        """The positions of newly sampled tokens, in order; () when they were not asked for."""
        if self._num_logprobs is None or self.cumulative_logprob is None:
            return ()
        positions = []
        for row, values in enumerate(lists.logprobs):
            self.cumulative_logprob += values[0]
            positions.append(self._position(lists, row, self._num_logprobs, self._last_token_id))
            self._last_token_id = lists.logprob_token_ids[row][0]
        return tuple(positions)

    def update_prompt(self, lists: LogprobsLists) -> tuple[dict[int, Logprob] | None, ...]:
        """The whole prompt: None for its first token, which nothing predicts, then the others.

        () when they were not asked for.
        """
        k = self._num_prompt_logprobs
        if k is None:
            return ()
        # As vLLM, which completes a label here with the candidate before it, never with
        # the prompt; unlike vLLM, not with the first output token either.
        rows = range(len(lists.logprobs))
        return (None, *(self._position(lists, row, k, before=None) for row in rows))

    def _position(
        self, lists: LogprobsLists, row: int, k: int, before: int | None
    ) -> dict[int, Logprob]:
        # The batch may carry more columns than this request asked for.
        num_columns = None if k == -1 else k + 1
        token_ids = lists.logprob_token_ids[row][:num_columns]
        values = lists.logprobs[row][:num_columns]
        ranks = (lists.sampled_token_ranks[row], *range(1, len(token_ids)))
        labels = self._labels(token_ids, before)
        # A token that is among the most likely keeps the first place and takes the entry
        # from there, whose rank does not count ties.
        return {
            token_id: Logprob(value, rank, label)
            for token_id, value, rank, label in zip(token_ids, values, ranks, labels, strict=True)
        }

    def _labels(self, token_ids: Sequence[int], before: int | None) -> list[str | None]:
        texts = self._texts
        if texts is None:
            return [None] * len(token_ids)
        return [
            texts[token_id]
            if not texts[token_id].endswith(REPLACEMENT)
            else self._label_of_a_part(texts, token_ids, place, before)
            for place, token_id in enumerate(token_ids)
        ]

    @staticmethod
    def _label_of_a_part(
        texts: TokenTexts, token_ids: Sequence[int], place: int, before: int | None
    ) -> str:
        """Of a token that is part of a character, which is nothing by itself.

        It is tried behind the candidate before it, then behind the token before this position
        as well.
        """
        attempts = [[*token_ids[max(place - 1, 0) : place + 1]]]
        if before is not None:
            attempts.append([before, *attempts[0]])
        labels = (texts.decode(attempt) for attempt in attempts)
        return next((label for label in labels if not label.endswith(REPLACEMENT)), "")
