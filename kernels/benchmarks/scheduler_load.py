"""What the scheduler's benchmark schedules: requests, scripted tokens and pool sizes.

Only the standard library is needed, since the workers of two engines import it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["EOS", "LOADS", "Load", "Plan", "token_at"]

EOS = 2
_NUM_PREFIXES = 20
_PREFIX_LEN = 128


@dataclass(frozen=True)
class Plan:
    """One request. It produces `num_output_tokens`, and EOS ends it or its limit does."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    ends_with_eos: bool

    @property
    def max_tokens(self) -> int:
        """What the engine is told: a request that ends with EOS could go on."""
        return self.num_output_tokens + 100 * self.ends_with_eos


def token_at(plan: Plan, position: int) -> int:
    """The token that a request produces at an output position, from 0."""
    if plan.ends_with_eos and position == plan.num_output_tokens - 1:
        return EOS
    return 3 + (plan.prompt_token_ids[-1] * 31 + position) % 30000


@dataclass(frozen=True)
class Load:
    """A closed loop: `num_live` requests at any time, a new one for each that ends.

    num_blocks         block 0 included
    num_warm_steps     before the measured ones: the first requests are admitted
    num_steps          measured
    num_finished       requests of one output token that come and go before all others
    num_kept_blocks    blocks that keep content of nobody's when the measuring begins
    """

    name: str
    num_live: int
    num_blocks: int
    num_warm_steps: int
    num_steps: int
    num_finished: int = 0
    num_kept_blocks: int = 0
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096

    def plans(self) -> Iterator[Plan]:
        """The requests in the order of their arrival; the same each time.

        Each begins with one of 20 prefixes of 128 tokens, and goes on with 8 to 128 of its own.
        Outputs have 50 to 250 tokens. The first `num_live` requests are met somewhere in theirs,
        so that from the beginning some end in every step.
        """
        generator = random.Random(self.num_live)
        prefixes = [_tokens(generator, _PREFIX_LEN) for _ in range(_NUM_PREFIXES)]
        number = 0
        while True:
            own = _tokens(generator, generator.randint(8, 128))
            num_output_tokens = generator.randint(50, 250)
            if number < self.num_live:
                num_output_tokens = generator.randint(self.num_warm_steps + 1, 250)
            yield Plan(
                f"request-{number}",
                generator.choice(prefixes) + own,
                num_output_tokens,
                ends_with_eos=generator.random() < 0.5,
            )
            number += 1

    def plans_before(self) -> Iterator[Plan]:
        """Requests that come and go first, and fill blocks that nobody else will hit."""
        generator = random.Random(-1)
        for number in range(self.num_finished):
            yield Plan(f"finished-{number}", _tokens(generator, 8), 1, ends_with_eos=False)
        length = 64 * self.block_size
        for number in range(-(-self.num_kept_blocks // 64)):
            yield Plan(f"kept-{number}", _tokens(generator, length), 1, ends_with_eos=False)


def _tokens(generator: random.Random, count: int) -> tuple[int, ...]:
    return tuple(generator.randint(3, 30000) for _ in range(count))


_SMALL = {"num_live": 40, "num_warm_steps": 20, "num_steps": 400}

LOADS = {
    load.name: load
    for load in (
        # 1,000 requests need some 20,000 blocks when none is shared.
        Load("decode", num_live=1000, num_blocks=30_000, num_warm_steps=30, num_steps=100),
        Load("16 requests", num_live=16, num_blocks=2_000, num_warm_steps=20, num_steps=1500),
        Load("pressure", num_live=1000, num_blocks=8_000, num_warm_steps=30, num_steps=100),
        Load("1,000 finished", num_blocks=30_000, num_finished=1_000, **_SMALL),
        Load("20,000 finished", num_blocks=30_000, num_finished=20_000, **_SMALL),
        Load("1,000 blocks", num_blocks=1_000, **_SMALL),
        Load("100,000 free blocks", num_blocks=100_000, **_SMALL),
        Load("100,000 kept blocks", num_blocks=100_000, num_kept_blocks=100_000, **_SMALL),
    )
}
