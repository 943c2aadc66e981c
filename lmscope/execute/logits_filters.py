"""Filters that leave only likely tokens: min_p, top-k and top-p.

Each one sets the logits of the tokens it removes to -inf, in place, and never removes the
most likely one. Tokens that are exactly as likely as the last one kept are kept too. Each
row depends on itself only, bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope.execute.largest import largest_k
from lmscope.execute.picked import pick

__all__ = ["filter_min_p", "filter_top_k", "filter_top_p"]

# The nucleus of top-p is nearly always among so many of the most likely tokens; only the rows
# where it is not are looked at again, and sorted in the end.
_NUM_CANDIDATES = (64, 1024)
# On a CPU: among the tokens of which so many together would be more than top-p leaves out.
_NUM_LEFT_OUT = (64, 1024, 16384)


def filter_min_p(logits: Tensor, log_min_p: Tensor) -> None:
    """Keep tokens at least min_p times as likely as the most likely one.

    logits     [R, V] float32
    log_min_p  [R] natural logarithm of min_p
    """
    threshold = logits.amax(dim=-1) + log_min_p
    _bar_below(logits, logits, threshold)


def filter_top_k(logits: Tensor, top_k: Tensor) -> None:
    """Keep the k most likely tokens.

    logits  [R, V] float32
    top_k   [R] int64, from 1 to V
    """
    values, _ = largest_k(logits, int(top_k.max()))
    threshold = values.gather(1, top_k[:, None] - 1)[:, 0]
    _bar_below(logits, logits, threshold)


def filter_top_p(logits: Tensor, top_p: Tensor) -> None:
    """Keep the fewest most likely tokens that together have at least the probability top_p.

    logits  [R, V] float32
    top_p   [R] float32, in (0, 1)
    """
    weights = logits.softmax(dim=-1)
    # Only nearly probabilities: softmax adds up in float32. What they add up to is taken more
    # exactly, so that whoever adds up in another order keeps the same up to ties.
    if logits.device.type == "cpu":
        array = weights.detach().numpy()
        total = torch.from_numpy(_totals(array))
        threshold = _top_p_threshold_on_cpu(array, top_p.double(), total)
    else:
        total = weights.sum(dim=-1, dtype=torch.float64)
        threshold = _top_p_threshold(weights, top_p.double(), total)
    _bar_below(logits, weights, threshold)


def _top_p_threshold(weights: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """The smallest weight that is kept of each row, [R] float32.

    weights         [R, V] float32
    top_p, total    [R] float64; total is what all of a row weigh
    """
    wanted = top_p * total
    vocab_size = weights.shape[1]
    threshold = weights.new_empty(len(weights))
    rows = torch.arange(len(weights), device=weights.device)
    for num_candidates in (*_NUM_CANDIDATES, vocab_size):
        left = weights if len(rows) == len(weights) else weights[rows]
        if num_candidates < vocab_size:
            candidates = left.topk(num_candidates, dim=-1).values
        else:
            candidates = left.sort(dim=-1, descending=True).values
        threshold[rows], has_reached = _nucleus(candidates, wanted[rows])
        if num_candidates >= vocab_size or bool(has_reached.all()):
            break
        rows = rows[~has_reached]
    return threshold


def _top_p_threshold_on_cpu(weights: NDArray[np.float32], top_p: Tensor, total: Tensor) -> Tensor:
    """The same to the bit: to compare all and to sort a few is quicker than to find the largest."""
    threshold = torch.empty(len(weights), dtype=torch.float32)
    wanted = top_p * total
    # What top-p leaves out.
    rest = ((1 - top_p) * total).numpy()
    rows = np.arange(len(weights))
    for num_left_out in (*_NUM_LEFT_OUT, None):
        left = weights if len(rows) == len(weights) else weights[rows]
        if num_left_out is not None:
            # So many below this together are less than that.
            smallest = (rest[rows] / num_left_out).astype(np.float32)
            left = pick(left, left >= smallest[:, None], padding=0.0).values
        descending = np.flip(np.sort(left, axis=1), axis=1)
        found, has_reached = _nucleus(torch.from_numpy(descending.copy()), wanted[rows])
        threshold[rows] = found
        rows = rows[~has_reached.numpy()]
        if not len(rows):
            break
    return threshold


def _totals(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """What each row adds up to, but for three roundings in float32, which save most of the time."""
    num_rows, vocab_size = weights.shape
    quarter = vocab_size // 4
    quarters = weights[:, : 4 * quarter].reshape(num_rows, 4, quarter).sum(axis=1)
    rest = weights[:, 4 * quarter :].sum(axis=1, dtype=np.float64)
    totals: NDArray[np.float64] = quarters.sum(axis=1, dtype=np.float64) + rest
    return totals


def _nucleus(weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest weight kept, and whether the candidates reach what is wanted at all.

    weights    [R, N] descending
    """
    up_to = weights.cumsum(dim=-1, dtype=torch.float64)
    num_kept = ((up_to - weights) < wanted[:, None]).sum(dim=-1, keepdim=True)
    threshold = weights.gather(1, num_kept.clamp_(min=1) - 1)[:, 0]
    return threshold, up_to[:, -1] >= wanted


def _bar_below(logits: Tensor, measure: Tensor, threshold: Tensor) -> None:
    """Set the logits to -inf whose measure is below the threshold of their row, [R].

    What is NaN is not below anything.
    """
    if logits.device.type == "cpu":
        # numpy compares in a tenth of torch's time, and writes in a third.
        is_below = measure.detach().numpy() < threshold.detach().numpy()[:, None]
        np.copyto(logits.detach().numpy(), -math.inf, where=is_below)
    else:
        logits.masked_fill_(measure < threshold[:, None], -math.inf)
