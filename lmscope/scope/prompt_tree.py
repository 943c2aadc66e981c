"""PromptTree: which earlier request begins with most of the same tokens.

A tree whose edges are runs of tokens. Two runs that begin alike share an edge until they
part, so adding and asking cost the length of one request, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["PromptTree"]

T = TypeVar("T")
Tokens = tuple[int, ...]


class _Edge(Generic[T]):
    """A run of tokens, and the first two who came through all of it, with when they did."""

    __slots__ = ("children", "tokens", "visits")

    def __init__(self, tokens: Tokens, visits: list[tuple[int, T]]) -> None:
        self.tokens = tokens
        self.visits = visits
        self.children: dict[int, _Edge[T]] = {}


class PromptTree(Generic[T]):
    """Token sequences, each with its owner and the time at which it was added."""

    def __init__(self) -> None:
        self._root: _Edge[T] = _Edge((), [])

    def add(self, tokens: Tokens, owner: T, order: int) -> None:
        """Add a sequence; `order` must not fall. An owner may add a longer one later."""
        edge, place = self._root, 0
        while place < len(tokens):
            following = edge.children.get(tokens[place])
            if following is None:
                following = edge.children[tokens[place]] = _Edge(tokens[place:], [])
            same = _num_equal(following.tokens, tokens, place)
            if same < len(following.tokens):
                _split(following, same)
            if len(following.visits) < 2 and all(o is not owner for _, o in following.visits):
                following.visits.append((order, owner))
            edge, place = following, place + same

    def longest(self, tokens: Tokens, before: int, other_than: T) -> tuple[T, int] | None:
        """Who, added before that time, shares most tokens from the start, and how many.

        Of several the one added first. None when nobody shares the first token.
        """
        found: tuple[T, int] | None = None
        edge, place = self._root, 0
        while place < len(tokens):
            following = edge.children.get(tokens[place])
            if following is None:
                break
            # The first two are enough: at most one of them is the one left out.
            visits = (o for t, o in following.visits if t < before and o is not other_than)
            visitor = next(visits, None)
            if visitor is None:
                break
            same = _num_equal(following.tokens, tokens, place)
            place += same
            found = visitor, place
            if same < len(following.tokens):
                break
            edge = following
        return found


def _split(edge: _Edge[T], at: int) -> None:
    """Cut an edge in two; whoever came through it came through both."""
    rest: _Edge[T] = _Edge(edge.tokens[at:], edge.visits.copy())
    rest.children = edge.children
    edge.tokens = edge.tokens[:at]
    edge.children = {rest.tokens[0]: rest}


def _num_equal(run: Tokens, tokens: Sequence[int], start: int) -> int:
    """How many tokens of a run are equal to those from `start` on."""
    there = tokens[start : start + len(run)]
    if run == there:
        return len(run)
    return next((i for i, (a, b) in enumerate(zip(run, there, strict=False)) if a != b), len(there))
