"""KVCacheManager: which blocks each request holds, and which of them it got from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from lmscope.boundary import PrefixCacheStats
from lmscope.engine.block_pool import BlockPool
from lmscope.engine.request import Request

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """The scheduler's view of the KV cache: one group of full-attention layers.

    drop_last_hit   EAGLE needs the hidden states of the last block of a hit, so it is
                    computed again
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        drop_last_hit: bool = False,
    ) -> None:
        self.block_pool = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.drop_last_hit = drop_last_hit
        # block table of each request that holds blocks, by position in its tokens
        self.req_to_blocks: dict[str, list[int]] = {}
        # how many leading blocks of each have their name already
        self.num_cached_block: dict[str, int] = {}
        # what the last allocate_slots() would have taken from the free queue
        self.blocks_needed = 0
        self._stats = [0] * 6
        self._was_reset = False

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return self.block_pool.usage

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix of a request: its blocks and how many tokens they hold.

        At most all tokens but the last, which must be computed to get its logits; so a
        prompt that fills its blocks exactly computes the last block again. Nothing
        changes but the statistics, which count every call as vLLM does.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return [], 0
        blocks = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block_id = self.block_pool.find(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        if self.drop_last_hit and blocks:
            blocks.pop()
        num_hits = len(blocks) * self.block_size
        first = 3 if request.num_preemptions else 0
        self._stats[first] += 1
        self._stats[first + 1] += request.num_tokens
        self._stats[first + 2] += num_hits
        return blocks, num_hits

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Sequence[int] = (),
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
    ) -> list[int] | None:
        """Give `request` room for `num_new_tokens` more tokens, drafts included.

            | computed | new_computed (hits) | new | lookahead |

        Returns the ids of the blocks added, possibly none, or None when the pool cannot
        serve it. On None nothing has changed, so the caller may preempt and try again.
        Full blocks get their names now, before the model has run: requests that are
        scheduled later in the same step can already share them.
        """
        request_id = request.request_id
        held = self.req_to_blocks.get(request_id)
        num_computed = min(
            request.num_computed_tokens + num_new_computed_tokens, self.max_model_len
        )
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        pool = self.block_pool
        num_held = (len(held) if held else 0) + len(new_computed_blocks)
        num_new_blocks = max(0, -(-num_slots // self.block_size) - num_held)
        needed = num_new_blocks
        for block_id in new_computed_blocks:
            # A hit that nobody holds has to leave the free queue as well.
            if pool.ref_cnt[block_id] == 0:
                needed += 1
        self.blocks_needed = needed
        if needed > len(pool.free_queue):
            return None

        if held is None:
            held = self.req_to_blocks[request_id] = []
        if new_computed_blocks:
            pool.touch(new_computed_blocks, request_id)
            held.extend(new_computed_blocks)
            self.num_cached_block[request_id] = len(held)
        new_blocks = pool.get_new_blocks(num_new_blocks, request_id) if num_new_blocks else []
        held.extend(new_blocks)
        if self.enable_caching and not delay_caching:
            # Drafts may be rejected, so only known tokens count.
            self.cache_blocks(request, min(num_computed + num_new_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Name the blocks that are full with the first `num_computed_tokens` tokens."""
        if not self.enable_caching:
            return
        num_full = num_computed_tokens // self.block_size
        first = self.num_cached_block.get(request.request_id, 0)
        if num_full <= first:
            return
        self.block_pool.store(
            self.req_to_blocks[request.request_id],
            request.block_hashes,
            request.all_token_ids,
            first,
            num_full,
            request.request_id,
        )
        self.num_cached_block[request.request_id] = num_full

    def forget_uncomputed(self, request: Request) -> None:
        """Take the names from blocks that only tokens of this step would have filled."""
        first = request.num_computed_tokens // self.block_size
        self.block_pool.forget(self.req_to_blocks[request.request_id][first:])

    def forget_stored(self, request_id: str) -> None:
        """Take the names from the blocks that a request holds and filled itself."""
        pool = self.block_pool
        pool.forget(
            block_id
            for block_id in self.req_to_blocks.get(request_id, ())
            if block_id in pool.stored and pool.stored[block_id][0] == request_id
        )

    def free(self, request: Request) -> int:
        """Let go of all blocks of a request; returns how many it held."""
        blocks = self.req_to_blocks.pop(request.request_id, [])
        self.num_cached_block.pop(request.request_id, None)
        # In reverse: the last block of a prompt is the least likely to be shared, so it
        # must be the first to be evicted.
        self.block_pool.free(reversed(blocks), request.request_id)
        return len(blocks)

    def get_block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self.req_to_blocks.get(request_id, ()))

    def largest_holder(self) -> tuple[str | None, int]:
        """The request that holds most blocks, the earliest of equals, and how many."""
        tables = self.req_to_blocks
        if not tables:
            return None, 0
        lengths = list(map(len, tables.values()))
        most = max(lengths)
        return next(islice(tables, lengths.index(most), None)), most

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks of a request that every request which holds blocks holds too.

        With a single request these are all of its blocks, a partly filled one included.
        Always 0 without caching, where nothing is shared.
        """
        if not self.enable_caching:
            return 0
        num_holders = len(self.req_to_blocks)
        count = 0
        for block_id in self.req_to_blocks.get(request_id, ()):
            if self.block_pool.ref_cnt[block_id] != num_holders:
                break
            count += 1
        return count

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any block is in use."""
        if not self.block_pool.reset():
            return False
        self._was_reset = True
        return True

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """Look-ups since the last call."""
        stats = PrefixCacheStats(self._was_reset, *self._stats)
        self._stats = [0] * 6
        self._was_reset = False
        return stats
