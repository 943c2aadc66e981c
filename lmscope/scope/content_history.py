"""ContentHistory: which blocks carried which content, from when to when.

Content has a name, the hash of its tokens and of all before them, and its salt. What tokens a
name stands for is learned from the requests that store it or hit it; so a recording that began
late knows names of which it never learns the tokens.
"""

from __future__ import annotations

from lmscope.scope.lives import Copy, Life

__all__ = ["ContentHistory"]


class ContentHistory:
    """Every copy of every name, and the names of every prefix that blocks ended with."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # name -> the blocks that carried it, oldest first; block -> what can be found in it
        self._copies: dict[int, list[Copy]] = {}
        self._content: dict[int, Copy] = {}
        # (prefix before, tokens of a block) -> prefix, and prefix -> its name under each salt
        self._prefixes: dict[tuple[int, tuple[int, ...]], int] = {}
        self._names: dict[int, dict[str | None, int]] = {}
        # what the snapshot held, and the names whose prefix is known
        self._inherited: list[tuple[tuple[int, ...], Copy]] = []
        self._placed: set[int] = set()

    # -- what happens ----------------------------------------------------------------

    def inherit(self, copy: Copy, token_ids: tuple[int, ...]) -> None:
        """A block carried this before the first struct."""
        self.keep(copy)
        self._inherited.append((token_ids, copy))

    def keep(self, copy: Copy) -> None:
        """A block can be found under a name from now on."""
        self._copies.setdefault(copy.name, []).append(copy)
        self._content[copy.block_id] = copy

    def lose(
        self, block_id: int, *, at: int, step: int, how: str, for_request_id: str | None = None
    ) -> None:
        """A block can not be found any more; nothing happens when it could not."""
        copy = self._content.pop(block_id, None)
        if copy is not None:
            copy.how, copy.removed_for = how, for_request_id
            copy.removed_at, copy.removed_step = at, step

    def clear(self, *, at: int, step: int) -> None:
        """No block can be found any more."""
        for block_id in list(self._content):
            self.lose(block_id, at=at, step=step, how="cleared")

    def learn(self, life: Life, index: int, name: int) -> None:
        """This name stands for a request's tokens up to the end of its block at `index`."""
        prefix = self._prefix(life, index, is_new=True)
        assert prefix is not None
        self._names.setdefault(prefix, {})[life.cache_salt] = name
        self._placed.add(name)

    # -- questions -------------------------------------------------------------------

    def of_block(self, block_id: int) -> Copy | None:
        """What can be found in a block now."""
        return self._content.get(block_id)

    def copies(self, life: Life, index: int) -> list[Copy]:
        """The blocks that ever carried what a request's block at `index` carries."""
        name = self._named(life, index).get(life.cache_salt)
        return [] if name is None else self._copies[name]

    def copies_under_other_salts(self, life: Life, index: int) -> list[Copy]:
        """The blocks that ever carried the same tokens, for requests of another salt."""
        names = self._named(life, index)
        others = [name for salt, name in names.items() if salt != life.cache_salt]
        found = [copy for name in others for copy in self._copies[name]]
        return sorted(found, key=lambda copy: copy.stored_at)

    def of_unknown_past(self, token_ids: tuple[int, ...]) -> list[Copy]:
        """Blocks that held these tokens when the recording began, after nobody knows which."""
        return [
            copy
            for tokens, copy in self._inherited
            if tokens == token_ids and copy.name not in self._placed
        ]

    def _named(self, life: Life, index: int) -> dict[str | None, int]:
        prefix = self._prefix(life, index, is_new=False)
        return {} if prefix is None else self._names.get(prefix, {})

    def _prefix(self, life: Life, index: int, is_new: bool) -> int | None:
        """A number for the tokens of a request up to the end of a block.

        None when no request's blocks ever held them, unless `is_new` gives them one.
        """
        size = self._block_size
        while len(life.prefixes) <= index:
            count = len(life.prefixes)
            before = life.prefixes[-1] if count else 0
            key = before, life.record.token_ids(count * size, (count + 1) * size)
            prefix = self._prefixes.get(key)
            if prefix is None:
                if not is_new:
                    return None
                prefix = self._prefixes[key] = len(self._prefixes) + 1
            life.prefixes.append(prefix)
        return life.prefixes[index]
