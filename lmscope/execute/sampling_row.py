"""SamplingRow: what the sampler must know of one request in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmscope.sampling_params import SamplingParams

__all__ = ["SamplingRow"]


# Compared by identity: the sampler keeps what it worked out for as long as it is given the
# same rows in the same order, and what it counted of one for as long as the row is there.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SamplingRow:
    """One request that samples a token; made once, kept for the life of the request.

    prompt_token_ids  must not change
    output_token_ids  the live list: it grows as tokens are sampled. It may be cut short; if other
                      tokens come into it, the request gets a new row
    seed              of its draws, 64 bits: params.seed, or one derived from the engine's
    stop_ids          every token that would end it, EOS included; min_tokens bars them
    bad_words_ids     token sequences that must not be completed
    """

    request_id: str
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int
    stop_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
