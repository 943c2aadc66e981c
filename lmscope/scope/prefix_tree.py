"""The prefixes in the pool as a tree: who reads what, what is kept, what is shared.

A node is a run of blocks that follow one another in the texts of the same readers. It costs
what is drawn: at most 80 ends of texts, at most 4,096 blocks, at most 200 nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

from lmscope.scope.pool_view import BlockView
from lmscope.scope.request_view import RequestView
from lmscope.scope.view import EngineView

__all__ = ["PrefixTree", "TreeNode"]

_MOST_READERS = 64
_MOST_ENDS = 80
_MOST_BLOCKS = 4096
_MOST_NODES = 200
_MOST_TEXT = 96
_MOST_WAITING = 8
# Kept blocks that are looked at to find where kept texts end.
_MOST_SEARCHED = 16_384

# The hash of a block, or minus its id while it has none.
Key = int


class TreeNode(msgspec.Struct, frozen=True, gc=False):
    """A run of blocks.

    node_id   stays while the run begins with the same block
    parent    node_id of the run before it; -1 at the beginning of a text
    start     how many blocks come before it
    count     blocks in it
    text      its beginning
    readers   the requests that hold it
    kept_by   the request that stored it, "" when nobody knows; None while somebody holds it
    """

    node_id: int
    parent: int
    start: int
    count: int
    text: str
    readers: tuple[str, ...]
    kept_by: str | None = None


class PrefixTree:
    """The tree of one view, brought up to date block by block."""

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self._is_stale = True
        self._holding: tuple[str, ...] = ()
        self._nodes: dict[int, TreeNode] = {}
        self._shapes: dict[int, tuple[int | None, tuple[str, ...], int | None]] = {}
        self._by_hash: dict[int, list[int]] = {}
        self._num_children: dict[int, int] = {}
        # block ids, last freed at the end
        self._kept: dict[int, None] = {}
        self._ids: dict[Key, int] = {}
        self._next_id = 0
        # text of nodes that is long enough to stay, and how many blocks it is from
        self._texts: dict[int, tuple[str, int]] = {}
        # of the nodes whose text still grows: their blocks
        self._growing: dict[int, list[int]] = {}
        self._node_of: dict[Key, int] = {}
        self._children: dict[Key | None, list[Key]] = {}
        self.note = ""

    def update(self, block_ids: Iterable[int]) -> None:
        """These blocks may have changed."""
        blocks = self._view.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            old = self._shapes.get(block_id)
            has_any = block.owners or block.block_hash is not None
            new = (block.block_hash, block.owners, block.parent_hash) if has_any else None
            if old != new:
                self._reshape(block_id, old, new)

    def nodes(self) -> dict[int, TreeNode]:
        """The nodes by id, each behind its parent, in an order that stays."""
        holding = self._view.holding
        if self._is_stale or holding != self._holding:
            self._is_stale, self._holding = False, holding
            self._build()
        else:
            self._refresh_texts()
        return self._nodes

    def hits(self) -> dict[int, dict[str, int]]:
        """Of each node that was hit in this step: how many of its blocks, by request."""
        self.nodes()
        found: dict[int, dict[str, int]] = {}
        for hit in self._view.hits:
            block = self._view.blocks[hit.block_id]
            node_id = self._node_of.get(_key(block))
            if node_id is not None:
                of_node = found.setdefault(node_id, {})
                of_node[hit.request_id] = of_node.get(hit.request_id, 0) + 1
        return found

    def waiting(self) -> list[tuple[str, int, int]]:
        """Of the next waiting requests: id, node up to which it would reuse, and how many blocks.

        The node is -1 where there is nothing to reuse.
        """
        self.nodes()
        head = islice(self._view.queue(), _MOST_WAITING)
        return [(i, *self._reusable(self._view.requests[i])) for i in head]

    # -- keeping up -----------------------------------------------------------------

    def _reshape(
        self,
        block_id: int,
        old: tuple[int | None, tuple[str, ...], int | None] | None,
        new: tuple[int | None, tuple[str, ...], int | None] | None,
    ) -> None:
        self._is_stale = True
        if old is not None and old[0] is not None:
            same = self._by_hash[old[0]]
            same.remove(block_id)
            if not same:
                del self._by_hash[old[0]]
            if old[2] is not None:
                self._num_children[old[2]] -= 1
                if not self._num_children[old[2]]:
                    del self._num_children[old[2]]
        self._kept.pop(block_id, None)
        if new is None:
            del self._shapes[block_id]
            return
        self._shapes[block_id] = new
        if new[0] is not None:
            self._by_hash.setdefault(new[0], []).append(block_id)
            if new[2] is not None:
                self._num_children[new[2]] = self._num_children.get(new[2], 0) + 1
            if not new[1]:
                self._kept[block_id] = None

    # -- building ---------------------------------------------------------------------

    def _build(self) -> None:
        view, shapes = self._view, self._shapes
        # key -> key before it; each is met behind its parent
        parents: dict[Key, Key | None] = {}
        readers: dict[Key, list[str]] = {}
        block_of: dict[Key, int] = {}
        num_read = 0
        for request_id in self._holding[:_MOST_READERS]:
            block_ids = view.requests[request_id].block_ids
            if len(parents) + len(block_ids) > _MOST_BLOCKS:
                break
            num_read += 1
            before: Key | None = None
            for block_id in block_ids:
                shape = shapes.get(block_id)
                key = -block_id if shape is None or shape[0] is None else shape[0]
                if key in parents:
                    readers[key].append(request_id)
                else:
                    parents[key] = before
                    readers[key] = [request_id]
                    block_of[key] = block_id
                before = key
        is_all_kept = self._add_kept(parents, block_of, num_read)
        self._compress(parents, readers, block_of)
        left_out = []
        if num_read < len(self._holding):
            left_out.append(f"{len(self._holding) - num_read:,} more run")
        if not is_all_kept:
            left_out.append("older kept text is left out")
        if len(self._nodes) == _MOST_NODES:
            left_out.append(f"it ends at {_MOST_NODES} runs")
        self.note = f"the tree is cut: {', '.join(left_out)}" if left_out else ""

    def _add_kept(
        self, parents: dict[Key, Key | None], block_of: dict[Key, int], num_ends: int
    ) -> bool:
        """Add the texts that are kept, the one used last first; whether all of them fit."""
        for searched, block_id in enumerate(reversed(self._kept)):
            if searched >= _MOST_SEARCHED:
                return False
            block_hash, _, before = self._shapes[block_id]
            assert block_hash is not None
            if block_hash in self._num_children or block_hash in parents:
                continue
            if num_ends >= _MOST_ENDS or len(parents) >= _MOST_BLOCKS:
                return False
            num_ends += 1
            chain = [(block_hash, self._oldest(block_hash))]
            while before is not None and before not in parents and before in self._by_hash:
                block_id = self._oldest(before)
                chain.append((before, block_id))
                before = self._shapes[block_id][2]
            known: Key | None = before if before in parents else None
            for key, block_id in reversed(chain):
                parents[key], block_of[key] = known, block_id
                known = key
        return True

    def _oldest(self, block_hash: int) -> int:
        """Of the blocks with this content the one that a hit would take."""
        block_ids = self._by_hash[block_hash]
        if len(block_ids) == 1:
            return block_ids[0]
        blocks = self._view.blocks
        return min(block_ids, key=lambda i: blocks[i].stored_order)

    def _compress(
        self,
        parents: dict[Key, Key | None],
        readers: dict[Key, list[str]],
        block_of: dict[Key, int],
    ) -> None:
        """Join what follows one another with the same readers into runs."""
        children: dict[Key | None, list[Key]] = {}
        for key, parent in parents.items():
            children.setdefault(parent, []).append(key)
        blocks = self._view.blocks
        ids: dict[Key, int] = {}
        nodes: dict[int, TreeNode] = {}
        self._children, self._node_of, self._growing = children, {}, {}
        # Those that came first stand first, so a node keeps its place.
        stack = [(key, -1, 0) for key in self._ordered(children.get(None, []), ids)[::-1]]
        while stack and len(nodes) < _MOST_NODES:
            first, parent, start = stack.pop()
            block = blocks[block_of[first]]
            if parent < 0 and block.index > 0:
                start = block.index  # what came before it is gone
            held = readers.get(first)
            run, last = [first], first
            while True:
                following = children.get(last, ())
                if len(following) != 1 or readers.get(following[0]) != held:
                    break
                last = following[0]
                run.append(last)
            node_id = ids[first]
            self._node_of.update(dict.fromkeys(run, node_id))
            nodes[node_id] = TreeNode(
                node_id,
                parent,
                start,
                len(run),
                self._text(node_id, run, block_of),
                tuple(held or ()),
                None if held else block.stored_by or "",
            )
            ordered = self._ordered(list(following), ids)
            stack += [(key, node_id, start + len(run)) for key in ordered[::-1]]
        self._nodes, self._ids = nodes, ids
        self._texts = {i: kept for i, kept in self._texts.items() if i in nodes}

    def _ordered(self, keys: list[Key], ids: dict[Key, int]) -> list[Key]:
        """Keys by the age of their nodes; each gets its id."""
        for key in keys:
            node_id = self._ids.get(key)
            if node_id is None:
                node_id, self._next_id = self._next_id, self._next_id + 1
            ids[key] = node_id
        return sorted(keys, key=ids.__getitem__)

    def _text(self, node_id: int, run: list[Key], block_of: dict[Key, int]) -> str:
        """The beginning of a run's text."""
        text, used = self._texts.get(node_id, ("", 0))
        if 0 < used <= len(run):
            return text
        text, is_final = "", True
        for used, key in enumerate(run, start=1):
            block_id = block_of[key]
            piece = self._view.block_text(block_id)
            # A block without a hash still grows, and the text of a new token comes last.
            is_final &= key >= 0 and piece != self._as_numbers(block_id)
            text += piece
            if len(text) >= _MOST_TEXT:
                text = text[:_MOST_TEXT]
                if is_final:
                    self._texts[node_id] = text, used
                break
        if not is_final:
            self._growing[node_id] = [block_of[key] for key in run]
        return text

    def _as_numbers(self, block_id: int) -> str:
        return " ".join(map(str, self._view.blocks[block_id].token_ids))

    def _refresh_texts(self) -> None:
        """Short texts grow with the last block of a request."""
        for node_id, block_ids in self._growing.items():
            text = ""
            for block_id in block_ids:
                text += self._view.block_text(block_id)
                if len(text) >= _MOST_TEXT:
                    break
            text = text[:_MOST_TEXT]
            if text != self._nodes[node_id].text:
                self._nodes[node_id] = msgspec.structs.replace(self._nodes[node_id], text=text)

    # -- what a request would reuse -----------------------------------------------------

    def _reusable(self, request: RequestView) -> tuple[int, int]:
        view, size = self._view, self._view.info.block_size
        key: Key | None = None
        count = 0
        # The last token is computed in any case.
        for index in range(max(0, request.num_tokens - 1) // size):
            tokens = request.token_ids(index * size, (index + 1) * size)
            found = next(
                (
                    child
                    for child in self._children.get(key, ())
                    if child in self._by_hash
                    and view.blocks[self._oldest(child)].token_ids == tokens
                    and (index or self._salt_of(child) == request.request.cache_salt)
                    and view.blocks[self._oldest(child)].index in (index, -1)
                ),
                None,
            )
            if found is None:
                break
            key, count = found, count + 1
        node_id = -1 if key is None else self._node_of.get(key, -1)
        return node_id, count

    def _salt_of(self, key: Key) -> str | None:
        block = self._view.blocks[self._oldest(key)]
        holder = block.stored_by if block.stored_by in self._view.requests else None
        holder = holder or next(iter(block.owners), None)
        record = self._view.requests.get(holder) if holder is not None else None
        return None if record is None else record.request.cache_salt


def _key(block: BlockView) -> Key:
    return -block.block_id if block.block_hash is None else block.block_hash
