"""Log probabilities of chosen tokens beside those of the most likely ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lmscope_kernels.sampling_cpu import MOST_LOGPROBS, SamplingLoops
from numpy.typing import NDArray
from torch import Tensor

from lmscope.boundary import LogprobsLists
from lmscope.execute.largest import largest_k

__all__ = ["gather_logprobs", "log_probabilities"]

# Rows whose keys, of eight bytes for each token, are in memory at once.
_ROWS_AT_ONCE = 16


def log_probabilities(
    logits: Tensor, token_ids: Tensor, k: int, loops: SamplingLoops | None
) -> LogprobsLists:
    """As gather_logprobs, of the log probabilities of logits [N, V] of any floating type.

    loops    compiled ones, for logits on a CPU; their sums may be rounded otherwise than torch's
    """
    vocab_size = logits.shape[1]
    count = vocab_size if k == -1 else min(k, vocab_size)
    if loops is None or count > MOST_LOGPROBS:
        return gather_logprobs(_log_softmax(logits), token_ids, k)
    array = logits.detach().to(torch.float32).contiguous().numpy()
    found = loops.log_probabilities(array, token_ids.numpy(), count)
    if not found.is_done.all():
        rows = np.flatnonzero(~found.is_done)
        some = _columns(_log_softmax(logits[rows]), token_ids[rows], k)
        found.token_ids[rows], found.logprobs[rows] = some[0].numpy(), some[1].numpy()
        found.ranks[rows] = some[2]
    return LogprobsLists(_rows(found.token_ids), _rows(found.logprobs), tuple(found.ranks.tolist()))


def gather_logprobs(
    values: Tensor, token_ids: Tensor, k: int, *, are_ties_by_id: bool = False
) -> LogprobsLists:
    """The value and rank of one token per row, and the k largest values of the row.

    values          [N, V] float32: log probabilities, or logits where those are asked for
    token_ids       [N] int64
    k               columns beside the token's own; -1: the whole vocabulary
    are_ties_by_id  of equal values those of the lowest ids, and these first; else as torch finds
                    them, which on a GPU may change with N
    """
    columns = _columns(values, token_ids, k, are_ties_by_id=are_ties_by_id)
    return LogprobsLists(_rows(columns[0]), _rows(columns[1]), columns[2])


def _columns(
    values: Tensor, token_ids: Tensor, k: int, *, are_ties_by_id: bool = False
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Tokens, values and ranks."""
    vocab_size = values.shape[1]
    chosen = values.gather(1, token_ids[:, None])
    count = vocab_size if k == -1 else min(k, vocab_size)
    top_values, top_ids = (
        _first_by_id(values, count) if are_ties_by_id else largest_k(values, count)
    )
    return (
        torch.cat((token_ids[:, None], top_ids), dim=1),
        torch.cat((chosen, top_values), dim=1),
        _ranks(values, chosen),
    )


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def _ranks(values: Tensor, chosen: Tensor) -> tuple[int, ...]:
    """How many values of each row are at least the chosen one, [N, 1]."""
    if values.device.type != "cpu":
        return tuple((values >= chosen).sum(dim=-1).tolist())
    # Comparing takes numpy a third of torch's time, and counting a tenth.
    is_at_least = values.detach().numpy() >= chosen.detach().numpy()
    return tuple(int(np.count_nonzero(row)) for row in is_at_least)


def _first_by_id(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As topk, and of equal values the lowest ids first: no two keys are the same."""
    vocab_size = values.shape[1]
    places = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    found = []
    for rows in torch.split(values, _ROWS_AT_ONCE):
        bits = rows.contiguous().view(torch.int32).long()
        # In the order of the numbers: below zero the larger magnitude is the smaller number.
        keys = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32) + places
        found.append(keys.topk(count, dim=-1).indices)
    indices = torch.cat(found)
    return values.gather(1, indices), indices


def _rows(table: Tensor | NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, table.tolist()))
