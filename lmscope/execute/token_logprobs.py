"""Log probabilities of chosen tokens beside those of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmscope.boundary import LogprobsLists

__all__ = ["gather_logprobs", "prompt_logprobs"]


def gather_logprobs(values: Tensor, token_ids: Tensor, k: int) -> LogprobsLists:
    """The value and rank of one token per row, and the k largest values of the row.

    values     [N, V] float32: log probabilities, or logits where those are asked for
    token_ids  [N] int64
    k          columns beside the token's own; -1: the whole vocabulary
    """
    vocab_size = values.shape[1]
    chosen = values.gather(1, token_ids[:, None])
    ranks = (values >= chosen).sum(dim=-1)
    top = values.topk(vocab_size if k == -1 else min(k, vocab_size), dim=-1)
    return LogprobsLists(
        logprob_token_ids=_rows(torch.cat((token_ids[:, None], top.indices), dim=1)),
        logprobs=_rows(torch.cat((chosen, top.values), dim=1)),
        sampled_token_ranks=tuple(ranks.tolist()),
    )


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, targets: Sequence[int], k: int) -> LogprobsLists:
    """Raw log probabilities of the prompt tokens that follow the given positions.

    logits   [N, V], row i computed from the prompt up to the token before targets[i]
    targets  [N] prompt token ids
    k        as in `gather_logprobs`
    """
    values = logits.log_softmax(dim=-1, dtype=torch.float32)
    return gather_logprobs(
        values, torch.tensor(targets, dtype=torch.int64, device=logits.device), k
    )


def _rows(table: Tensor) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, table.tolist()))
