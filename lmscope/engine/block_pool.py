"""BlockPool: the blocks of the KV cache, who holds them, and which content can be found again.

Blocks are numbers. Block 0 is the null block: it is never handed out, so a pool of
`num_blocks` serves `num_blocks - 1`. A block is in one of three states:

    in use   at least one request holds it (ref_cnt > 0)
    kept     nobody holds it, but it still has a name and its content can be hit
    empty    nobody holds it and it has no name

Kept and empty blocks wait in one free queue. It is consumed at the head and filled at the
tail, so the kept block that has rested longest is the next to lose its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lmscope.boundary import (
    AllBlocksCleared,
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    BlockTouched,
    KVEvent,
)
from lmscope.engine.prefix_hash import short_hash

__all__ = ["NULL_BLOCK", "BlockPool", "FreeQueue"]

NULL_BLOCK = 0


class FreeQueue:
    """Block ids in the order in which they will be handed out.

    A doubly linked list over the ids: taking any block out of the middle, which a prefix
    hit does, costs the same as taking the first. Block 0 is head and tail of the ring.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._size = num_blocks - 1

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[0]
        while block_id:
            yield block_id
            block_id = self._next[block_id]

    def popleft(self) -> int:
        block_id = self._next[0]
        if not block_id:
            raise IndexError("no free block")
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        following, previous = self._next[block_id], self._previous[block_id]
        self._next[previous] = following
        self._previous[following] = previous
        self._size -= 1

    def append(self, block_id: int) -> None:
        last = self._previous[0]
        self._next[last] = block_id
        self._previous[block_id] = last
        self._next[block_id] = 0
        self._previous[0] = block_id
        self._size += 1


class BlockPool:
    """Hands blocks out, takes them back, and finds them by the name of their content.

    Every change is written to `events` while `record_events` is set, in the order of
    happening; `step` is what a stored block remembers as its time of birth.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_kv_blocks is {num_blocks}; at least 2 are needed, since block 0 is reserved"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_cnt = [0] * num_blocks
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.free_queue = FreeQueue(num_blocks)
        # per named block: the request that filled it, when, and with which tokens
        self.stored: dict[int, tuple[str, int, tuple[int, ...]]] = {}
        self.record_events = False
        self.events: list[KVEvent] = []
        self.step = 0
        # Name -> the blocks that carry it, in the order in which they were stored. Most
        # names have one block, so a bare number stands for a set of one.
        self._blocks_by_hash: dict[bytes, int | dict[int, None]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, kept ones included."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - len(self.free_queue) / (self.num_blocks - 1)

    def find(self, block_hash: bytes) -> int | None:
        """The block stored first under this name; None is a miss."""
        found = self._blocks_by_hash.get(block_hash)
        if found is None or isinstance(found, int):
            return found
        return next(iter(found))

    def get_new_blocks(self, num_blocks: int, request_id: str) -> list[int]:
        """Take blocks from the head of the free queue; content they kept is lost.

        There must be enough: the caller has looked at num_free_blocks.
        """
        blocks = []
        for _ in range(num_blocks):
            block_id = self.free_queue.popleft()
            if self.block_hash[block_id] is not None:
                self._forget(block_id, request_id)
            self.ref_cnt[block_id] = 1
            if self.record_events:
                self.events.append(BlockAllocated(block_id, request_id))
            blocks.append(block_id)
        return blocks

    def touch(self, blocks: Iterable[int], request_id: str) -> None:
        """Let `request_id` hold blocks that were found by name."""
        for block_id in blocks:
            if self.ref_cnt[block_id] == 0:
                self.free_queue.remove(block_id)
            self.ref_cnt[block_id] += 1
            if self.record_events:
                stored_by, step, _ = self.stored[block_id]
                self.events.append(BlockTouched(block_id, request_id, stored_by, step))

    def free(self, blocks: Iterable[int], request_id: str) -> None:
        """Let go of blocks. Those nobody holds any more join the free queue in this order.

        They keep name and content until they are handed out again.
        """
        for block_id in blocks:
            self.ref_cnt[block_id] -= 1
            if self.ref_cnt[block_id] == 0:
                self.free_queue.append(block_id)
            if self.record_events:
                self.events.append(BlockFreed(block_id, request_id))

    def store(
        self,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        first: int,
        last: int,
        request_id: str,
    ) -> None:
        """Give the full blocks `first` to `last - 1` of a request their names.

        blocks, hashes   of the whole request, by position
        token_ids        all its tokens

        Several blocks may carry one name. They are never merged, so a request's block
        table only ever grows at its end.
        """
        size = self.block_size
        for index in range(first, last):
            block_id, block_hash = blocks[index], hashes[index]
            assert self.block_hash[block_id] is None, "a stored block is stored again"
            self.block_hash[block_id] = block_hash
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            self.stored[block_id] = (request_id, self.step, tokens)
            found = self._blocks_by_hash.get(block_hash)
            if found is None:
                self._blocks_by_hash[block_hash] = block_id
            elif isinstance(found, int):
                self._blocks_by_hash[block_hash] = {found: None, block_id: None}
            else:
                found[block_id] = None
            if self.record_events:
                self.events.append(
                    BlockStored(
                        block_id,
                        request_id,
                        short_hash(block_hash),
                        short_hash(hashes[index - 1]) if index else None,
                        tokens,
                        index,
                    )
                )

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the names of blocks whose content must not be hit."""
        for block_id in blocks:
            if self.block_hash[block_id] is not None:
                self._forget(block_id, None)

    def reset(self) -> bool:
        """Forget all names; False, and nothing happens, while any block is in use."""
        if len(self.free_queue) != self.num_blocks - 1:
            return False
        self._blocks_by_hash.clear()
        self.stored.clear()
        self.block_hash = [None] * self.num_blocks
        if self.record_events:
            self.events.append(AllBlocksCleared())
        return True

    def take_events(self) -> tuple[KVEvent, ...]:
        """Events since the last call."""
        if not self.events:
            return ()
        events = tuple(self.events)
        self.events.clear()
        return events

    def _forget(self, block_id: int, for_request_id: str | None) -> None:
        """Drop the name of a block, so that nobody can find what is about to be overwritten."""
        block_hash = self.block_hash[block_id]
        assert block_hash is not None
        self.block_hash[block_id] = None
        del self.stored[block_id]
        found = self._blocks_by_hash[block_hash]
        if isinstance(found, int):
            del self._blocks_by_hash[block_hash]
        else:
            del found[block_id]
            if not found:
                del self._blocks_by_hash[block_hash]
        if self.record_events:
            self.events.append(BlockRemoved(block_id, short_hash(block_hash), for_request_id))
