"""The prefix tree of a picture, whole or as what changed since a reader last got it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lmscope.scope.picture_rows import clean
from lmscope.scope.prefix_tree import PrefixTree, TreeNode
from lmscope.scope.view import EngineView

__all__ = ["SentTree"]


class SentTree:
    """The tree as one reader has it."""

    def __init__(self, view: EngineView) -> None:
        self._tree = PrefixTree(view)
        self._sent: dict[int, TreeNode] = {}
        self._sent_rest: tuple[Any, ...] = ()

    def update(self, block_ids: Iterable[int]) -> None:
        """These blocks may have changed."""
        self._tree.update(block_ids)

    def whole(self) -> dict[str, Any]:
        """All of it, as docs/picture.md lays it down."""
        self._sent, self._sent_rest = {}, ()
        return self.changed() or {"nodes": []}

    def changed(self) -> dict[str, Any] | None:
        """What the reader lacks; None when it lacks nothing."""
        tree = self._tree
        nodes, hits = tree.nodes(), tree.hits()
        rest = (hits, tree.waiting(), tree.note)
        sent = self._sent
        new = [_as_json(node, sent.get(i)) for i, node in nodes.items() if sent.get(i) != node]
        gone = [i for i in self._sent if i not in nodes]
        if not new and not gone and rest == self._sent_rest:
            return None
        self._sent, self._sent_rest = dict(nodes), rest
        made: dict[str, Any] = {"nodes": new}
        if gone:
            made["gone"] = gone
        if hits:
            made["hits"] = {str(i): of_node for i, of_node in hits.items()}
        if rest[1]:
            made["waiting"] = [list(entry) for entry in rest[1]]
        if tree.note:
            made["note"] = tree.note
        return made


def _as_json(node: TreeNode, sent: TreeNode | None) -> list[Any]:
    """All of a node; of one that has only become longer, or shorter, its id and length."""
    if sent is not None and msgspec.structs.replace(sent, count=node.count) == node:
        return [node.node_id, node.count]
    whole = [
        node.node_id,
        node.parent,
        node.start,
        node.count,
        clean(node.text),
        list(node.readers),
    ]
    return whole if node.kept_by is None else [*whole, node.kept_by]
