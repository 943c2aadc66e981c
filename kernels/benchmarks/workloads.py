"""What the benchmarks generate from: prompts as token ids, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Workload", "make_encoder", "make_workload", "workload_shape"]

_NUM_OUTPUT_TOKENS = 64
# No multiple of a block of 32 tokens, so that the last common block is only partly shared.
_NUM_COMMON_TOKENS = 400


class Workload(NamedTuple):
    """Prompts as token ids, and how many tokens to generate for each."""

    name: str
    prompts: list[list[int]]
    num_output_tokens: list[int]


def make_workload(name: str, encode: Callable[[str], list[int]]) -> Workload:
    """The prompts of a workload, from text that the tokenizer behind `encode` knows.

    They are the same each time. No two of them share a first block, but for "shared16", where
    all begin with the same 400 tokens and go on alone.
    """
    lengths, num_output_tokens = workload_shape(name)
    if name == "shared16":
        common = _prompt(0, _NUM_COMMON_TOKENS, encode)
        own = [length - _NUM_COMMON_TOKENS for length in lengths]
        prompts = [common + _prompt(i + 1, length, encode) for i, length in enumerate(own)]
    else:
        prompts = [_prompt(index, length, encode) for index, length in enumerate(lengths)]
    return Workload(name, prompts, num_output_tokens)


def workload_shape(name: str) -> tuple[list[int], list[int]]:
    """Prompt tokens and output tokens of each request; ValueError for an unknown name.

    "4x20" is 4 prompts of 20 tokens, each followed by 64. "mixed16" is 16 prompts of 16 to 512
    tokens followed by 8 to 64, long prompts with short and long outputs alike. "shared16" is 16
    prompts with 400 common tokens and 20 of their own, each followed by 64.
    """
    if name == "mixed16":
        lengths = [16 + 496 * i // 15 for i in range(16)]
        return lengths, [8 + 56 * (7 * i % 16) // 15 for i in range(16)]
    if name == "shared16":
        return [_NUM_COMMON_TOKENS + 20] * 16, [_NUM_OUTPUT_TOKENS] * 16
    count, _, length = name.partition("x")
    if not (count.isdecimal() and length.isdecimal() and int(count) and int(length)):
        raise ValueError(f"workload is {name!r}; it must be like 4x20, or mixed16, or shared16")
    return [int(length)] * int(count), [_NUM_OUTPUT_TOKENS] * int(count)


def make_encoder(folder: str) -> Callable[[str], list[int]]:
    """Text to token ids with the tokenizer of a model's folder, and nothing added to them.

    The bytes of the text where the folder has no tokenizer, which any vocabulary of 256 knows.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return lambda text: list(text.encode())
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    return encode


_SUBJECTS = ("The engineer", "My neighbour", "A careful reader", "The old captain", "Our teacher")
_VERBS = ("explains", "measures", "forgets", "repairs", "describes", "compares", "paints")
_OBJECTS = ("the long river", "a broken clock", "three small boats", "the city library", "music")
_ENDINGS = ("before breakfast", "for the first time", "without a word", "in the rain", "again")


def _prompt(index: int, num_tokens: int, encode: Callable[[str], list[int]]) -> list[int]:
    generator = random.Random(index)
    # The number in front keeps two prompts apart whatever follows.
    sentences = [f"Note {index}."]
    while True:
        token_ids = encode(" ".join(sentences))
        if len(token_ids) >= num_tokens:
            return token_ids[:num_tokens]
        for _ in range(10):
            words = (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS)
            sentences.append(" ".join(generator.choice(choices) for choices in words) + ".")
