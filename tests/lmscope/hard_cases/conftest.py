"""Engines on the scripted model, which are closed when a test is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmscope import LLM
from lmscope.boundary import EngineSnapshot
from lmscope.testing import byte_tokenizer

DEADLINE_S = 200


class Held:
    """An endless script that stops before one token of each request until `go` is set.

    While it stands there the engine is inside a step, so what a test does meanwhile happens
    at a known place.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.arrived = threading.Event()
        self.go = threading.Event()

    def __call__(self, request_id: str, position: int) -> int:
        if position == self.position:
            self.arrived.set()
            assert self.go.wait(DEADLINE_S)
        return 97 + position % 26


@pytest.fixture
def held() -> type[Held]:
    return Held


@pytest.fixture
def scripted() -> Iterator[Callable[..., LLM]]:
    """Makes an LLM: scripted("text" or token ids or a function, **options).

    A text or ids are what each request gets, and then the end of the text.
    """
    engines = []

    def make(script: str | Sequence[int] | Callable[[str, int], int | None], **options) -> LLM:
        if not callable(script):
            ids = list(script.encode()) if isinstance(script, str) else list(script)
            script = lambda i, n: ids[n] if n < len(ids) else None  # noqa: E731
        engine = LLM("s", execute="scripted", script=script, **{"block_size": 4, **options})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random model over bytes; it knows five ids that the byte tokenizer does not.

    Its weights are large and its head is its own, so that every token changes the logits.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder) -> Iterator[Callable[..., LLM]]:
    """Makes an LLM on the tiny model: tiny(**options)."""
    engines = []

    def make(**options) -> LLM:
        options = {"num_kv_blocks": 64, "threads": 1, **options}
        if engines:
            engines.append(engines[0].like(**options))
        else:
            engines.append(LLM(tiny_folder, tokenizer=byte_tokenizer(), **options))
        return engines[-1]

    yield make
    for engine in reversed(engines):
        engine.close()


@pytest.fixture
def state_of() -> Callable[[LLM], EngineSnapshot]:
    """The engine's state between two structs."""

    def take(llm: LLM) -> EngineSnapshot:
        snapshot, subscription = llm.tap.follow(lambda boundary: None)
        subscription.close()
        return snapshot

    return take


def endless(request_id: str, position: int) -> int:
    return 97 + (position * 7 + sum(map(ord, request_id))) % 26


@pytest.fixture(name="endless")
def endless_fixture() -> Callable[[str, int], int]:
    """A script without an end, another one for each request."""
    return endless
