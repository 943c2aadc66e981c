"""The rejection sampler: which drafts the model stands by, and what it says instead.

One forward scores all drafts of a request. The first that is rejected is replaced, and what
comes behind it is dropped; when all are accepted, the row behind the last gives one more
token. So each request gets at least one, and tokens have the distribution that they would
have without drafts; those of a greedy request are the same tokens.

The engine does not draft yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["rejection_sample"]


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Sequence[Sequence[int]],
    bonus_token_ids: Sequence[int],
    is_greedy: Sequence[bool],
    uniform: Tensor,
    draw: Callable[[Tensor, list[int]], Tensor],
    draft_probs: Tensor | None = None,
) -> list[tuple[int, ...]]:
    """The tokens of each request: accepted drafts, then a replacement or the bonus token.

    target_logits    [N, V] float32, a row per draft, those of a request together: what the
                     token in its place would be drawn from, or for a greedy request be the
                     largest of
    draft_token_ids  of each of R requests, from 0 to V - 1; N in all
    bonus_token_ids  [R] sampled from the row behind the last draft
    is_greedy        [R]
    uniform          [N] float64, above 0 and below 1; not looked at for greedy requests
    draw             (log probabilities [M, V], the rows of `target_logits` that they replace
                     [M]) -> a token drawn from each, [M]; they need not sum to 1
    draft_probs      [N, V] what the drafts were drawn from; None: they were certain
    """
    counts = [len(token_ids) for token_ids in draft_token_ids]
    assert target_logits.shape[0] == sum(counts)
    device = target_logits.device
    drafts = torch.tensor(list(itertools.chain(*draft_token_ids)), dtype=torch.int64, device=device)
    greedy_rows = list(itertools.chain(*map(itertools.repeat, is_greedy, counts)))

    best = target_logits.argmax(dim=-1)
    is_accepted = best == drafts
    replacements = best.tolist()
    target_probs = None if all(greedy_rows) else target_logits.softmax(dim=-1)
    if target_probs is not None:
        is_accepted = torch.where(
            torch.tensor(greedy_rows, device=device),
            is_accepted,
            _is_accepted(target_probs, drafts, uniform, draft_probs),
        )
    accepted = is_accepted.tolist()
    starts = itertools.accumulate(counts, initial=0)
    spans = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    ends = [next((row for row in span if not accepted[row]), None) for span in spans]

    # Drawn for at most one row of each request: noise for a whole vocabulary is expensive.
    drawn_rows = [row for row in ends if row is not None and not greedy_rows[row]]
    if target_probs is not None and drawn_rows:
        rest = _without_drafts(
            target_probs[drawn_rows],
            drafts[drawn_rows],
            None if draft_probs is None else draft_probs[drawn_rows],
        )
        for row, token_id in zip(drawn_rows, draw(rest.log(), drawn_rows).tolist(), strict=True):
            replacements[row] = token_id
    return [
        (*token_ids, bonus) if end is None else (*token_ids[: end - span.start], replacements[end])
        for token_ids, bonus, span, end in zip(
            draft_token_ids, bonus_token_ids, spans, ends, strict=True
        )
    ]


def _is_accepted(
    target_probs: Tensor, drafts: Tensor, uniform: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """Whether each draft stays: with the probability target / draft, or always above 1. [N]"""
    target = target_probs.gather(1, drafts[:, None])[:, 0]
    if draft_probs is None:
        return target >= uniform
    draft = draft_probs.gather(1, drafts[:, None])[:, 0]
    # One that could not have been drawn is a mistake of the proposer's and never stays.
    return (draft > 0) & (target >= uniform * draft)


def _without_drafts(target_probs: Tensor, drafts: Tensor, draft_probs: Tensor | None) -> Tensor:
    """The probability that accepting drafts has left to each token, up to a factor. [M, V]"""
    if draft_probs is None:
        rest = target_probs.scatter(1, drafts[:, None], 0.0)
    else:
        rest = (target_probs - draft_probs).clamp_(min=0.0)
    # Nothing is left when both are the same but for rounding.
    has_rest = rest.amax(dim=-1, keepdim=True) > 0
    return torch.where(has_rest, rest, target_probs)
