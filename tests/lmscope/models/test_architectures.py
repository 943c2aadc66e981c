"""Each architecture through LLM, from a folder: the logits and the tokens of transformers.

The models are tiny, with random weights that are large and embeddings of their own, so that
logits depend on every token. Three prompts share a beginning and run in a pool too small for
them, with a budget smaller than a prompt: there are chunks, hits and preemptions, and each test
looks that there were. A companion test damages a block in the cache and must see the tokens
change; otherwise a model that ignores its cache, or a config whose windows hide nothing, would
pass the first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput, SchedulerOutput

TOLERANCE = 1e-4
BLOCK_SIZE = 4
WINDOW = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN_HEADS = {
    key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "head_dim")
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MIXED = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", PLAIN_HEADS | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", COMMON),
    "mistral": ("MistralConfig", COMMON | {"sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3MoeConfig", COMMON | EXPERTS),
    "gemma2": (
        "Gemma2Config",
        COMMON | MIXED | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    ),
    "gemma3": ("Gemma3TextConfig", COMMON | MIXED),
    "phi3": (
        "Phi3Config",
        PLAIN_HEADS | {"num_key_value_heads": 2, "sliding_window": WINDOW},
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
            "initializer_range": 0.5, "tie_word_embeddings": False, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", PLAIN_HEADS),
    "olmo2": ("Olmo2Config", COMMON),
    "granite": (
        "GraniteConfig",
        COMMON | {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    ),
    "smollm3": ("SmolLM3Config", COMMON | {"no_rope_layers": [1, 0]}),
}  # fmt: skip
WITH_WINDOWS = ("mistral", "gemma2", "gemma3", "phi3")

SHARED = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11, 62, 13, 50, 77, 35]
PROMPTS = {
    "a": [*SHARED, 41, 42, 43],
    "b": [*SHARED[:16], 91, 18, 27, 36, 45, 54],
    "c": [*SHARED, 10, 20, 30, 40, 60, 70, 80, 19, 28, 37],
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of("llama")` is a saved model; the one of qwen3_moe is in many parts."""
    folders = {}

    def make(name: str):
        if name not in folders:
            config_class, settings = CONFIGS[name]
            torch.manual_seed(0)
            config = getattr(transformers, config_class)(**settings)
            module = transformers.AutoModelForCausalLM.from_config(config)
            folder = tmp_path_factory.mktemp(name)
            size = "10KB" if name == "qwen3_moe" else "1GB"
            module.save_pretrained(folder, max_shard_size=size)
            folders[name] = folder
        return folders[name]

    return make


def load(folder, **options) -> LLM:
    # One thread, as in all tests; with more, sums may come out in another order.
    return LLM(folder, block_size=BLOCK_SIZE, threads=1, exact=True, **options)


class Computed(NamedTuple):
    """One token that went through the model."""

    request_id: str
    position: int
    logits: torch.Tensor


class Watcher:
    """Notes the logits of every token that the engine computes, and what the scheduler did."""

    def __init__(self, llm: LLM) -> None:
        self.computed: list[Computed] = []
        self.scheduled: list[SchedulerOutput] = []
        self.cache: Any = None
        self._forwards: list[tuple[Any, torch.Tensor]] = []
        self._is_inside = False
        self._handle = llm.module.register_forward_hook(self._on_forward, with_kwargs=True)
        llm.tap.on(SchedulerOutput, self.scheduled.append, strict=True)
        llm.tap.on(ModelRunnerOutput, self._on_output, strict=True)

    def _on_forward(self, module, args, kwargs, output) -> None:
        if self._is_inside:
            return
        self._is_inside = True
        self.cache = kwargs["lmscope_cache"]
        # The engine asks for the rows that it samples from; once more, for all of them. The
        # keys and values that this writes are those that are there.
        everything = module(*args, **{**kwargs, "logits_to_keep": 0}).logits[0]
        self._forwards.append((kwargs["lmscope_batch"], everything.clone()))
        self._is_inside = False

    def _on_output(self, output: ModelRunnerOutput) -> None:
        for batch, logits in self._forwards:
            starts = batch.query_start_loc.tolist()
            for row, request_id in enumerate(output.req_ids):
                for token in range(starts[row], starts[row + 1]):
                    position = int(batch.positions[token])
                    self.computed.append(Computed(request_id, position, logits[token]))
        self._forwards.clear()

    def new_request(self, request_id: str):
        return next(
            new
            for output in self.scheduled
            for new in output.scheduled_new_reqs
            if new.req_id == request_id
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens_are_those_of_transformers(folder_of, name):
    folder = folder_of(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()

    with load(folder, num_kv_blocks=28, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        watcher = Watcher(llm)
        streams = {
            name: llm.submit({"prompt_token_ids": prompt}, GREEDY, request_id=name)
            for name, prompt in PROMPTS.items()
        }
        texts = {name: [*PROMPTS[name], *s.wait().token_ids] for name, s in streams.items()}

    assert_scheduler_was_busy(watcher)
    with torch.inference_mode():
        expected = {name: reference(torch.tensor([text])).logits[0] for name, text in texts.items()}
    seen = defaultdict(set)
    for request_id, position, logits in watcher.computed:
        difference = (logits - expected[request_id][position]).abs().max().item()
        assert difference < TOLERANCE, (request_id, position)
        seen[request_id].add(position)
    for request_id, prompt in PROMPTS.items():
        cached = watcher.new_request(request_id).num_computed_tokens
        assert seen[request_id] == set(range(cached, len(prompt) + 31))
        # Each token the best after those before it: that is what greedy means.
        best = expected[request_id][len(prompt) - 1 : -1].argmax(dim=-1)
        assert texts[request_id][len(prompt) :] == best.tolist()
        assert len(best) == 32


def assert_scheduler_was_busy(watcher: Watcher) -> None:
    """There were chunks, prefix hits and preemptions."""
    first_steps = {
        new.req_id: (new, output.num_scheduled_tokens[new.req_id])
        for output in watcher.scheduled
        for new in output.scheduled_new_reqs
    }
    assert any(
        new.num_computed_tokens + num_tokens < len(new.prompt_token_ids)
        for new, num_tokens in first_steps.values()
    )
    assert any(new.num_computed_tokens > 0 for new, _ in first_steps.values())
    assert any(output.preempted_req_ids for output in watcher.scheduled)


def tokens_after_damage(folder, first_token: int | None, only_windowed: bool = False):
    """The tokens of a prompt whose shared beginning comes from the cache.

    first_token      damage the block that begins with this token of the prompt
    only_windowed    damage it in layers with a window only

    Returns the tokens and the logits of every computed position, as a list.
    """
    with load(folder, num_kv_blocks=64) as llm:
        watcher = Watcher(llm)
        llm.submit({"prompt_token_ids": PROMPTS["a"]}, GREEDY, request_id="a").wait()
        if first_token is not None:
            block_id = watcher.new_request("a").block_ids[0][first_token // BLOCK_SIZE]
            for layer, window in enumerate(windows_by_layer(llm.module)):
                if window is not None or not only_windowed:
                    watcher.cache.key[layer][block_id].mul_(-2)
                    watcher.cache.value[layer][block_id].mul_(-2)
        watcher.computed.clear()
        tokens = llm.submit({"prompt_token_ids": PROMPTS["c"]}, GREEDY, request_id="c").wait()
        assert watcher.new_request("c").num_computed_tokens == len(SHARED)
    return tokens.token_ids, [each.logits.tolist() for each in watcher.computed]


def windows_by_layer(module) -> list[int | None]:
    config = module.config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 3
    return [
        window if types[layer] == "sliding_attention" else None
        for layer in range(config.num_hidden_layers)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_damaged_block_inside_the_window_changes_the_tokens(folder_of, name):
    folder = folder_of(name)
    whole, _ = tokens_after_damage(folder, None)

    # The first computed token is the 24th and attends to the 17th and later.
    damaged, _ = tokens_after_damage(folder, 20, only_windowed=name in WITH_WINDOWS)

    assert damaged != whole


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_a_damaged_block_outside_the_window_changes_nothing(folder_of, name):
    folder = folder_of(name)
    whole = tokens_after_damage(folder, None)

    damaged = tokens_after_damage(folder, 12, only_windowed=True)

    assert damaged == whole


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_layers_without_a_window_still_attend_to_all(folder_of, name):
    folder = folder_of(name)
    whole, _ = tokens_after_damage(folder, None)

    damaged, _ = tokens_after_damage(folder, 0)

    assert damaged != whole
