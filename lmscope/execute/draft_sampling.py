"""Sampling with drafts: the sampler's pipeline around the rejection sampler.

A draft is judged as if it had been sampled: behind the drafts before it, under all
parameters of its request, with the random numbers of its own position. The engine does not
draft yet, so nothing calls this.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmscope.execute.random_draws import draw_tokens, uniform_draws
from lmscope.execute.sampler import Sampler, errors_of
from lmscope.execute.sampling_row import SamplingRow
from lmscope.speculate.rejection_sampler import rejection_sample

__all__ = ["DraftSamplerOutput", "sample_with_drafts"]


@dataclass(frozen=True, slots=True)
class DraftSamplerOutput:
    """What was sampled, one entry per request.

    token_ids  [R] at least one, at most one more than there were drafts
    errors     by request, why one of its tokens means nothing: it must end with an error
    """

    token_ids: list[tuple[int, ...]]
    errors: dict[int, str]


@torch.inference_mode()
def sample_with_drafts(
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[SamplingRow],
    draft_token_ids: Sequence[Sequence[int]],
    draft_probs: Tensor | None = None,
) -> DraftSamplerOutput:
    """Accept or replace the drafts of each request, and sample one more where all stay.

    logits           [N + R, V] any floating type; those of a request together: a row for
                     each of its drafts, then the one behind the last
    rows             [R] requests, with or without drafts; they are not changed
    draft_token_ids  [R] of each, from 0 to V - 1; N in all
    draft_probs      [N, V] what the drafts were drawn from; None: they were certain

    A request without drafts gets the token that `sampler.sample` gives it.
    """
    all_rows = [
        each
        for row, drafts in zip(rows, draft_token_ids, strict=True)
        for each in _rows_of(row, drafts)
    ]
    assert len(logits) == len(all_rows)
    counts = [len(drafts) for drafts in draft_token_ids]
    ends = list(itertools.accumulate(counts))
    bonus_at = [end + i for i, end in enumerate(ends)]
    draft_at = sorted(set(range(len(logits))).difference(bonus_at))
    draft_rows = [all_rows[at] for at in draft_at]
    seeds = [row.seed for row in draft_rows]
    positions = [len(row.output_token_ids) for row in draft_rows]

    def draw(log_probs: Tensor, some: list[int]) -> Tensor:
        return draw_tokens(log_probs, [seeds[i] for i in some], [positions[i] for i in some])[1]

    target = sampler.process(logits[draft_at], draft_rows)
    bonus = sampler.sample(logits[bonus_at], [all_rows[at] for at in bonus_at])
    token_ids = rejection_sample(
        target,
        draft_token_ids,
        bonus.token_ids,
        [row.params.is_greedy for row in rows],
        uniform_draws(seeds, positions, target.device),
        draw,
        draft_probs,
    )

    draft_errors = errors_of(target.amax(dim=-1))
    errors: dict[int, str] = {}
    for i, tokens in enumerate(token_ids):
        messages = [draft_errors.get(row) for row in range(ends[i] - counts[i], ends[i])]
        messages.append(bonus.errors.get(i))
        # What a row behind a rejected draft says means nothing, good or bad.
        for message in messages[: len(tokens)]:
            if message is not None:
                errors.setdefault(i, message)
    return DraftSamplerOutput(token_ids, errors)


def _rows_of(row: SamplingRow, drafts: Sequence[int]) -> list[SamplingRow]:
    """`row` before each draft and behind the last, as if the drafts had been sampled."""
    output = row.output_token_ids
    return [row] + [
        dataclasses.replace(row, output_token_ids=(*output, *drafts[:count]))
        for count in range(1, len(drafts) + 1)
    ]
