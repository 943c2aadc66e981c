"""The misses of the prefix cache that need no past: the request and its tokens explain them."""

from __future__ import annotations

from lmscope.boundary import EngineInfo
from lmscope.decisions import Miss, PrefixMiss
from lmscope.sampling_params import SamplingParams

__all__ = ["sure_miss"]


def sure_miss(
    info: EngineInfo, params: SamplingParams, num_tokens: int, position: int
) -> PrefixMiss | None:
    """Why an admission missed, where no block has to be known for it; None elsewhere.

    num_tokens    that the look-up saw
    position      of the first that was not in the cache
    """
    if not info.enable_prefix_caching:
        return PrefixMiss(Miss.LOOKUP_SKIPPED, position, detail="caching is off")
    if params.skip_reading_prefix_cache:
        asked = params.prompt_logprobs is not None
        detail = "prompt_logprobs" if asked else "skip_reading_prefix_cache"
        return PrefixMiss(Miss.LOOKUP_SKIPPED, position, detail=detail)
    if num_tokens - position < info.block_size:
        return PrefixMiss(Miss.SHORTER_THAN_BLOCK, position)
    return None
