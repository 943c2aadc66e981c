"""Tiny models with random weights, and a scheduler made by hand that drives a ModelRunner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmscope import SamplingParams
from lmscope.boundary import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder("gemma2", sliding_window=7)` -> the folder of a tiny model, made once.

    Weights are large and embeddings untied, so that logits depend on every token; heads are
    not hidden_size / num_heads wide, and several of them share keys.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        Gemma2Config,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
    )

    configs = {
        "gemma2": Gemma2Config,
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
    }
    made: dict[Any, Path] = {}

    def make(kind: str, **changes: Any) -> Path:
        key = kind, tuple(sorted(changes.items()))
        if key not in made:
            settings = {
                "vocab_size": 97,
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 128,
                "initializer_range": 0.5,
                "tie_word_embeddings": False,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **changes,
            }
            made[key] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(configs[kind](**settings)).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(model_folder: Callable[..., Path]) -> Callable[..., tuple[Any, Any]]:
    """`tiny_model("qwen3", **config)` -> (LoadedModel, the same weights as transformers has them).

    Of a model_folder, loaded once.
    """
    from transformers import AutoModelForCausalLM

    from lmscope.models.loader import load_model

    made: dict[Path, tuple[Any, Any]] = {}

    def make(kind: str = "llama", **changes: Any) -> tuple[Any, Any]:
        folder = model_folder(kind, **changes)
        if folder not in made:
            reference = AutoModelForCausalLM.from_pretrained(folder).eval()
            made[folder] = load_model(folder, show_progress=False), reference
        return made[folder]

    return make


class Driver:
    """A scheduler by hand: says what runs, keeps the books, and notes every logit.

    blocks     id -> its block table; taken from a shuffled free list as tokens need them
    tokens     id -> what is known: the prompt, then what was sampled
    logits     id -> {position: [V]}, of every token that was computed, not only sampled ones
    """

    def __init__(
        self, loaded: Any, block_size: int = 4, num_blocks: int = 80, **options: Any
    ) -> None:
        import torch

        from lmscope.execute.model_runner import ModelRunner

        self.loaded = loaded
        self.block_size = block_size
        self.runner = ModelRunner(loaded, num_blocks, block_size, 16, 256, seed=7, **options)
        # 7 has no factor in common with the number of usable blocks, so each comes once.
        self.free = [1 + i * 7 % (num_blocks - 1) for i in range(num_blocks - 1)]
        self.params: dict[str, SamplingParams] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self.outputs: list[ModelRunnerOutput] = []
        self._steps = itertools.count(1)
        self._ran_last: set[str] = set()
        self._announced: set[str] = set()
        self._resumed: set[str] = set()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        shares: str | None = None,
        num_shared_blocks: int = 0,
    ) -> None:
        """A new request; its first blocks may be another's, and count as computed."""
        self.params[request_id] = params
        self.num_prompt_tokens[request_id] = len(prompt)
        self.tokens[request_id] = list(prompt)
        self.blocks[request_id] = self.blocks[shares][:num_shared_blocks] if shares else []
        self.computed[request_id] = num_shared_blocks * self.block_size
        self.logits[request_id] = {}

    def preempt(self, request_id: str) -> None:
        """Take all blocks away; the next time it runs it is resumed, with new ones."""
        self.free += self.blocks[request_id]
        self.blocks[request_id] = []
        self.computed[request_id] = 0
        self._resumed.add(request_id)

    def step(
        self, scheduled: Mapping[str, int] | Sequence[str], *, finished: Sequence[str] = ()
    ) -> ModelRunnerOutput:
        """Run a step; with a list of ids each gets all the tokens that it has left."""
        if not isinstance(scheduled, Mapping):
            scheduled = {i: len(self.tokens[i]) - self.computed[i] for i in scheduled}
        output = self.run(self.schedule(scheduled, finished))
        self._ran_last = set(scheduled)
        return output

    def schedule(
        self, scheduled: Mapping[str, int], finished: Sequence[str] = ()
    ) -> SchedulerOutput:
        """The SchedulerOutput of a step; the books already count it as run."""
        for request_id in finished:
            self._announced.discard(request_id)
        new, rows = [], []
        for request_id, num_tokens in scheduled.items():
            before = len(self.blocks[request_id])
            needed = -(-(self.computed[request_id] + num_tokens) // self.block_size)
            self.blocks[request_id] += [self.free.pop(0) for _ in range(needed - before)]
            added = tuple(self.blocks[request_id][before:])
            if request_id not in self._announced:
                self._announced.add(request_id)
                new.append(
                    NewRequestData(
                        request_id,
                        tuple(self.tokens[request_id]),
                        self.params[request_id],
                        (tuple(self.blocks[request_id]),),
                        self.computed[request_id],
                    )
                )
            else:
                rows.append((request_id, (added,) if added else None))
        ids = tuple(request_id for request_id, _ in rows)
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=tuple(i for i in ids if i in self._resumed),
            all_token_ids={
                i: tuple(self.tokens[i])
                for i in ids
                if i in self._resumed or i not in self._ran_last
            },
            new_block_ids=tuple(added for _, added in rows),
            num_computed_tokens=tuple(self.computed[i] for i in ids),
            num_output_tokens=tuple(len(self.tokens[i]) - self.num_prompt_tokens[i] for i in ids),
        )
        self._resumed.difference_update(ids)
        return SchedulerOutput(
            step=next(self._steps),
            scheduled_new_reqs=tuple(new),
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=tuple(finished),
        )

    def run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        hidden = []
        hook = self.loaded.module.model.register_forward_hook(
            lambda module, args, result: hidden.append(result.last_hidden_state)
        )
        with hook:
            output = self.runner.execute_model(scheduler_output)
        if output is not None:
            return output
        logits = self.loaded.module.lm_head(hidden[0])[0].clone()
        output = self.runner.sample_tokens()
        start = 0
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            for _ in range(scheduler_output.num_scheduled_tokens[request_id]):
                self.logits[request_id][self.computed[request_id]] = logits[start]
                self.computed[request_id] += 1
                start += 1
            self.tokens[request_id] += sampled
        self.outputs.append(output)
        return output

    def largest_difference(self, request_id: str, reference: Any) -> float:
        """Between the logits noted and those of a plain forward over all tokens."""
        import torch

        with torch.inference_mode():
            expected = reference(torch.tensor([self.tokens[request_id]])).logits[0]
        noted = self.logits[request_id]
        assert noted, "nothing was computed"
        return max((expected[p] - row).abs().max().item() for p, row in noted.items())


@pytest.fixture(scope="session")
def driver() -> type[Driver]:
    return Driver
