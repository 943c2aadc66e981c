"""LogprobsProcessor: columns of numbers become log probabilities with text, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmscope.boundary import EngineCoreRequest, Logprob, LogprobsLists
from lmscope.frontend.tokenizer import TokenizerAdapter

__all__ = ["LogprobsProcessor"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class LogprobsProcessor:
    """Turns the log probabilities of one request into what its user gets.

    Each position is a mapping from token id to Logprob: the token itself first, then the
    most likely ones with ranks from 1, so k or k + 1 entries.

    num_logprobs         k of the output; -1: all that there are
    num_prompt_logprobs  k of the prompt
    decode               text of some ids, special tokens included; None: no text at all
    cumulative_logprob   of the sampled tokens so far; None when they were not asked for
    """

    def __init__(
        self,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self.cumulative_logprob = None if num_logprobs is None else 0.0
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._decode = decode
        self._last_token_id: int | None = None

    @classmethod
    def for_request(
        cls, tokenizer: TokenizerAdapter | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """A processor with the text of `tokenizer`, unless the request wants none."""
        params = request.sampling_params

        def decode(ids: Sequence[int]) -> str:
            assert tokenizer is not None
            return tokenizer.decode(ids, skip_special_tokens=False)

        has_text = tokenizer is not None and params.detokenize
        return cls(params.logprobs, params.prompt_logprobs, decode if has_text else None)

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
        decode = self._decode
        if decode is None:
            return [None] * len(token_ids)
        labels: list[str | None] = []
        for i, token_id in enumerate(token_ids):
            # Part of a character is nothing by itself. It is tried behind the candidate
            # before it, then behind the token before this position as well.
            context = [*token_ids[max(i - 1, 0) : i], token_id]
            attempts = [[token_id], context]
            if before is not None:
                attempts.append([before, *context])
            texts = (decode(attempt) for attempt in attempts)
            labels.append(next((text for text in texts if not text.endswith(_REPLACEMENT)), ""))
        return labels
