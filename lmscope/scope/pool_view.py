"""The block pool as the stream tells it: who holds each block, what it keeps, who is next.

Nothing is stored for a free empty block, so a pool of a million blocks costs what is in use
or kept in it. A `BlockView` never changes; a change puts another one in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import overload

import msgspec

from lmscope.boundary import BlockAllocated, BlockRemoved, BlockSnapshot, BlockStored, BlockTouched

__all__ = ["BlockView", "Blocks", "FreeQueue", "PoolView"]


class BlockView(msgspec.Struct, frozen=True, gc=False):
    """One block at one moment.

    owners       the requests that hold it, oldest holder first
    block_hash   64 bits; None when the block cannot be found in the prefix cache
    stored_by    the request that filled it, and in which step; with a hash only
    token_ids    the tokens in it; known with a hash only
    index        its position in the block tables that list it; -1 when unknown
    num_filled   tokens whose keys and values are in it or are being computed in this step
    stored_order grows with the time of storing; of two blocks with one hash the older is hit
    parent_hash  of the block before it; None for the first one, and where nobody told
    """

    block_id: int
    owners: tuple[str, ...] = ()
    block_hash: int | None = None
    stored_by: str | None = None
    stored_step: int = 0
    token_ids: tuple[int, ...] = ()
    index: int = -1
    num_filled: int = 0
    stored_order: int = 0
    parent_hash: int | None = None

    @property
    def ref_cnt(self) -> int:
        """How many requests hold it."""
        return len(self.owners)

    @property
    def state(self) -> str:
        """'null', 'in_use', 'kept' (free, with content that can be hit) or 'empty'."""
        if self.block_id == 0:
            return "null"
        if self.owners:
            return "in_use"
        return "empty" if self.block_hash is None else "kept"


class FreeQueue:
    """Block ids in the order in which they will be handed out.

    Blocks that were never used lie at the head in one run, which is kept as a range, and
    those that were freed follow, so the queue costs what happened and not what it holds.
    """

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._base = _as_range(block_ids)
        self._head = 0
        # of the base: taken out behind its head
        self._taken: set[int] = set()
        self._tail: dict[int, None] = {}

    def copy(self) -> FreeQueue:
        other = FreeQueue(())
        other._base, other._head = self._base, self._head
        other._taken, other._tail = set(self._taken), self._tail.copy()
        return other

    def __len__(self) -> int:
        return len(self._base) - self._head - len(self._taken) + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        base, taken = self._base, self._taken
        rest = (base[place] for place in range(self._head, len(base)))
        return chain((i for i in rest if i not in taken) if taken else rest, self._tail)

    def first(self, count: int) -> list[int]:
        """The next `count` ids, or as many as there are."""
        return list(islice(self, count))

    def append(self, block_id: int) -> None:
        self._tail[block_id] = None

    def remove(self, block_id: int) -> None:
        """Take an id out, wherever it stands; it must be in the queue."""
        if block_id in self._tail:
            del self._tail[block_id]
            return
        base = self._base
        if self._head == len(base) or base[self._head] != block_id:
            self._taken.add(block_id)
            return
        self._head += 1
        while self._head < len(base) and base[self._head] in self._taken:
            self._taken.discard(base[self._head])
            self._head += 1


class Blocks(Sequence[BlockView]):
    """All blocks of the pool by id, block 0 included."""

    def __init__(self, known: dict[int, BlockView], num_blocks: int) -> None:
        self._known = known
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    @overload
    def __getitem__(self, key: int) -> BlockView: ...
    @overload
    def __getitem__(self, key: slice) -> list[BlockView]: ...
    def __getitem__(self, key: int | slice) -> BlockView | list[BlockView]:
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(self._num_blocks))]
        block_id = key + self._num_blocks if key < 0 else key
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block id is {key}; the pool has {self._num_blocks} blocks")
        return self._known.get(block_id) or BlockView(block_id)

    def not_empty(self) -> Iterator[BlockView]:
        """The blocks that are in use or kept, in no particular order."""
        return iter(self._known.values())


class PoolView:
    """All blocks and the free queue; folds one KV event per call.

    changed   ids of blocks that changed since the owner of this set last emptied it
    kept_by   for each request the number of kept blocks that it stored
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        blocks: Iterable[BlockSnapshot] = (),
        free_queue: Sequence[int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_queue = FreeQueue(range(1, num_blocks) if free_queue is None else free_queue)
        self.num_kept = 0
        self.num_shared = 0
        self.kept_by: dict[str, int] = {}
        self.changed: set[int] = set()
        self._known: dict[int, BlockView] = {}
        self._num_stored = 0
        for block in blocks:
            self._put(
                BlockView(
                    block.block_id,
                    block.owners,
                    block.block_hash,
                    block.stored_by,
                    block.stored_step,
                    block.token_ids,
                    num_filled=0 if block.block_hash is None else block_size,
                    stored_order=block.stored_order,
                )
            )
            self._num_stored = max(self._num_stored, block.stored_order)

    def copy(self) -> PoolView:
        """Another pool in the same state, with nothing in `changed`."""
        other = PoolView(self.num_blocks, self.block_size, free_queue=())
        other.free_queue = self.free_queue.copy()
        other.num_kept, other.num_shared = self.num_kept, self.num_shared
        other.kept_by, other._known = self.kept_by.copy(), self._known.copy()
        other._num_stored = self._num_stored
        return other

    @property
    def blocks(self) -> Blocks:
        return Blocks(self._known, self.num_blocks)

    @property
    def num_used(self) -> int:
        """Blocks that at least one request holds."""
        return len(self._known) - self.num_kept

    @property
    def num_empty(self) -> int:
        """Free blocks without content; the null block is none of them."""
        return self.num_blocks - 1 - len(self._known)

    def get(self, block_id: int) -> BlockView:
        return self._known.get(block_id) or BlockView(block_id)

    def allocate(self, event: BlockAllocated) -> None:
        """Take a free block out of the queue for a request, without its content."""
        if not self.get(event.block_id).owners:
            self.free_queue.remove(event.block_id)
        self._put(BlockView(event.block_id, (event.request_id,)))

    def touch(self, event: BlockTouched) -> tuple[str, ...]:
        """Add a holder; returns those before it."""
        block = self.get(event.block_id)
        if not block.owners:
            self.free_queue.remove(event.block_id)
        if event.request_id not in block.owners:
            self._put(_with_owners(block, (*block.owners, event.request_id)))
        return block.owners

    def store(self, event: BlockStored, step: int) -> None:
        """Make the content of a full block findable."""
        self._num_stored += 1
        self._put(
            BlockView(
                event.block_id,
                self.get(event.block_id).owners,
                event.block_hash,
                event.request_id,
                step,
                event.token_ids,
                event.index,
                self.block_size,
                self._num_stored,
                event.parent_block_hash,
            )
        )

    def free(self, block_id: int, request_id: str) -> tuple[str, ...] | None:
        """Take a holder away; returns those that remain, or None if it held nothing.

        The last one puts the block at the tail of the queue.
        """
        block = self.get(block_id)
        if request_id not in block.owners:
            return None
        owners = tuple(owner for owner in block.owners if owner != request_id)
        if not owners:
            self.free_queue.append(block_id)
        self._put(_with_owners(block, owners))
        return owners

    def remove(self, event: BlockRemoved) -> BlockView:
        """Drop the content of a block; returns the block as it was."""
        block = self.get(event.block_id)
        self._put(
            BlockView(block.block_id, block.owners, index=block.index, num_filled=block.num_filled)
        )
        return block

    def clear(self) -> None:
        """Drop all content."""
        for block in [b for b in self._known.values() if b.block_hash is not None]:
            self._put(
                BlockView(
                    block.block_id, block.owners, index=block.index, num_filled=block.num_filled
                )
            )

    def place(self, block_id: int, index: int) -> None:
        """Say where in a block table the block stands."""
        block = self._known.get(block_id)
        if block is not None and block.index != index:
            self._put(_with_place(block, index, block.num_filled))

    def fill(self, block_id: int, num_filled: int) -> None:
        """Say how many tokens are in it."""
        block = self._known.get(block_id)
        if block is not None and block.num_filled != num_filled:
            self._put(_with_place(block, block.index, num_filled))

    def _put(self, new: BlockView) -> None:
        old = self._known.get(new.block_id)
        if old is not None:
            self._count(old, -1)
        if new.owners or new.block_hash is not None:
            self._known[new.block_id] = new
            self._count(new, 1)
        elif old is not None:
            del self._known[new.block_id]
        self.changed.add(new.block_id)

    def _count(self, block: BlockView, one: int) -> None:
        if len(block.owners) > 1:
            self.num_shared += one
        elif not block.owners:
            self.num_kept += one
            if block.stored_by is not None:
                self.kept_by[block.stored_by] = self.kept_by.get(block.stored_by, 0) + one
                if not self.kept_by[block.stored_by]:
                    del self.kept_by[block.stored_by]


def _with_owners(block: BlockView, owners: tuple[str, ...]) -> BlockView:
    return BlockView(
        block.block_id,
        owners,
        block.block_hash,
        block.stored_by,
        block.stored_step,
        block.token_ids,
        block.index,
        block.num_filled,
        block.stored_order,
        block.parent_hash,
    )


def _with_place(block: BlockView, index: int, num_filled: int) -> BlockView:
    return BlockView(
        block.block_id,
        block.owners,
        block.block_hash,
        block.stored_by,
        block.stored_step,
        block.token_ids,
        index,
        num_filled,
        block.stored_order,
        block.parent_hash,
    )


def _as_range(block_ids: Sequence[int]) -> Sequence[int]:
    """The same ids; as a range where they count up by one, which takes no memory."""
    if isinstance(block_ids, range) or not block_ids:
        return block_ids
    run = range(block_ids[0], block_ids[0] + len(block_ids))
    return run if all(map(int.__eq__, block_ids, run)) else block_ids
