"""Tokens and log probabilities of all rows of a step, on a CPU, each row in one go in its cache.

The definition is lmscope's Sampler without these loops. Thresholds of top-k and min-p are the same
to the bit. Sums of probabilities, and noise, are not: so a row in which rounding could decide where
top-p ends, or between two tokens, is not decided here, and the caller asks the definition. Every
token that is decided is the one that it gives.

The loops are compiled by numba, which is optional (the extra `cpu`).

    sampling_loops(vocab_size) -> SamplingLoops, or None without numba
    SamplingLoops.choose(...)
    SamplingLoops.log_probabilities(...)

R or N rows, V vocabulary.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmscope_kernels.numba_support import why_not_numba

__all__ = [
    "MOST_LOGPROBS",
    "Changes",
    "Choices",
    "RowColumns",
    "SamplingLoops",
    "TopLogprobs",
    "prepare_sampling_loops",
    "sampling_loops",
]

# More of them are not inserted one by one.
MOST_LOGPROBS = 64
# Values, weights or bounds, both again, and a row that is changed.
_NUM_FLOATS = 5


class RowColumns(NamedTuple):
    """What rows ask for, all [R]; greedy rows have a temperature of 0 and nothing else matters.

    temperature    float32
    log_min_p      float32; -inf: no such filter
    top_k          int64; 0: no such filter
    top_p          float32; 1: no such filter
    seeds          uint64
    """

    temperature: NDArray[np.float32]
    log_min_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]


class Changes(NamedTuple):
    """What rows change in their logits first; E entries and B barred tokens of all rows together.

    Row r has the entries starts[r] up to starts[r + 1], of different tokens. An entry adds its
    bias, divides what is above 0 by its repetition and multiplies the rest by it, and subtracts
    the last two.

    entry_starts     [R + 1] int64
    entry_ids        [E] int64
    entries          [4, E] float32: bias, repetition, by frequency, by presence
    barred_starts    [R + 1] int64
    barred_ids       [B] int64
    is_only          [R] bool: tokens without an entry are barred too
    """

    entry_starts: NDArray[np.int64]
    entry_ids: NDArray[np.int64]
    entries: NDArray[np.float32]
    barred_starts: NDArray[np.int64]
    barred_ids: NDArray[np.int64]
    is_only: NDArray[np.bool_]

    @classmethod
    def none(cls, num_rows: int) -> Changes:
        starts, ids = np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int64)
        entries = np.zeros((4, 0), np.float32)
        return cls(starts, ids, entries, starts, ids, np.zeros(num_rows, np.bool_))


class Choices(NamedTuple):
    """What was chosen, [R] each.

    best          float32, the largest score: NaN where a logit is, -inf where all are
    token_ids     int64
    least         float32, the lowest logit / temperature that was left; -inf: all, or greedy
    is_decided    False: the definition has to say
    """

    best: NDArray[np.float32]
    token_ids: NDArray[np.int64]
    least: NDArray[np.float32]
    is_decided: NDArray[np.bool_]


class TopLogprobs(NamedTuple):
    """Log probabilities; column 0 is the given token, the others descend, equal ones by id.

    token_ids    [N, 1 + k] int64
    logprobs     [N, 1 + k] float32
    ranks        [N] int64, how many tokens are at least as likely
    is_done      [N]; False: a logit is NaN or infinite, or fewer than k are above -inf
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    is_done: NDArray[np.bool_]


class SamplingLoops:
    """The compiled loops and their memory; for one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._rows: Any = importlib.import_module("lmscope_kernels.row_sampling_numba")
        self._choices: Any = importlib.import_module("lmscope_kernels.sampling_numba")
        kernels = self._rows
        size = -(-vocab_size // kernels.BLOCK) * kernels.BLOCK
        # The system hands pages out when they are first written: few rows need all of it.
        self._scratch = (
            np.empty((_NUM_FLOATS, max(size, kernels.NUM_PIECES)), np.float32),
            np.empty(size, np.int32),
            np.empty(kernels.NUM_PIECES, np.float32),
            np.empty(kernels.NUM_SUMS, np.float64),
        )

    def choose(
        self,
        logits: NDArray[np.float32],
        columns: RowColumns,
        positions: NDArray[np.int64],
        changes: Changes,
    ) -> Choices:
        """A token for each row.

        logits       [R, V] contiguous; not changed
        positions    [R] number of output tokens before this one
        """
        num_rows = len(logits)
        choices = Choices(
            np.empty(num_rows, np.float32),
            np.empty(num_rows, np.int64),
            np.empty(num_rows, np.float32),
            np.empty(num_rows, np.bool_),
        )
        self._choices.choose_rows(logits, *columns, positions, *changes, *self._scratch, *choices)
        return choices

    def log_probabilities(
        self, logits: NDArray[np.float32], token_ids: NDArray[np.int64], k: int
    ) -> TopLogprobs:
        """Of the given tokens and of the k most likely ones.

        logits       [N, V] contiguous; not changed
        token_ids    [N]
        k            at most MOST_LOGPROBS, and V
        """
        num_rows = len(logits)
        result = TopLogprobs(
            np.empty((num_rows, 1 + k), np.int64),
            np.empty((num_rows, 1 + k), np.float32),
            np.empty(num_rows, np.int64),
            np.empty(num_rows, np.bool_),
        )
        self._rows.log_probabilities(logits, token_ids, k, *self._scratch, *result)
        return result


def sampling_loops(vocab_size: int) -> SamplingLoops | None:
    """None: numba is missing or does not run here.

    Compiled, or loaded from what an earlier process compiled, when first called.
    """
    return SamplingLoops(vocab_size) if why_not_numba() is None else None


def prepare_sampling_loops() -> None:
    """Compile, or load what an earlier process compiled; it does not depend on shapes."""
    loops = SamplingLoops(1)
    columns = RowColumns(
        np.ones(1, np.float32),
        np.zeros(1, np.float32),
        np.zeros(1, np.int64),
        np.ones(1, np.float32),
        np.zeros(1, np.uint64),
    )
    logits, zeros = np.zeros((1, 1), np.float32), np.zeros(1, np.int64)
    loops.choose(logits, columns, zeros, Changes.none(1))
    loops.log_probabilities(logits, zeros, 1)
