"""Names for blocks of tokens: equal names mean equal tokens after equal tokens.

Each full block is named by a SHA-256 digest over the name of the block before it and its
own tokens, so a name stands for the whole prefix that ends with the block. What else must
be equal for keys and values to be equal (the salt) is part of the root of the chain, as a
tagged field of its own, so that a salt cannot pass for anything else.
"""

from __future__ import annotations

import hashlib
from array import array

import msgspec

__all__ = ["BlockHasher", "short_hash"]


class BlockHasher:
    """Names the full blocks of a token list. The same tokens get the same names in every run."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def extend(self, hashes: list[bytes], token_ids: list[int], cache_salt: str | None) -> None:
        """Append to `hashes` the names of the blocks of `token_ids` that are full by now.

        hashes       names of the first blocks, as this method left them
        token_ids    all tokens, prompt and outputs
        """
        size = self.block_size
        first = len(hashes)
        num_full = len(token_ids) // size
        if first == num_full:
            return
        parent = hashes[-1] if hashes else root_hash(cache_salt)
        for start in range(first * size, num_full * size, size):
            tokens = array("I", token_ids[start : start + size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            hashes.append(parent)


def root_hash(cache_salt: str | None) -> bytes:
    """The name that stands before the first block."""
    fields = {"lmscope": 1} if cache_salt is None else {"lmscope": 1, "cache_salt": cache_salt}
    return hashlib.sha256(msgspec.msgpack.encode(fields)).digest()


def short_hash(block_hash: bytes) -> int:
    """The lowest 64 bits of a name, as events carry it (vLLM's external form)."""
    return int.from_bytes(block_hash[-8:], "big")
