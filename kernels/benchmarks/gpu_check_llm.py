"""Engines that gpu_check.py runs, and how long their steps take.

Models have random weights, and everything goes through the public LLM.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from gpu_check_models import Model, model_folder
from gpu_check_report import Check

if TYPE_CHECKING:
    from lmscope import LLM

__all__ = ["decode_steps", "load_engine", "prefill_s", "random_prompts", "require_engine"]

_BLOCK_SIZE = 16


def require_engine() -> None:
    """ImportError, with what to do, where the engine cannot be imported."""
    try:
        from lmscope import LLM, SamplingParams  # noqa: F401  # only whether it can
    except ImportError as error:
        raise ImportError(
            f"lmscope's engine cannot be imported here ({error}); install that package, or carry "
            "its wheel, and run items 4 and 6 to 8 again"
        ) from error


def load_engine(
    check: Check,
    model: Model,
    context: int,
    *,
    is_eager: bool,
    is_overlapped: bool = False,
    **options: Any,
) -> LLM:
    """An engine with such a model, and room for its largest batch at this context.

    options    of LLM, in the place of those that are chosen here
    """
    from lmscope import LLM

    num_seqs = max(model.step_goals_ms)
    per_request = -(-(context + 512) // _BLOCK_SIZE)
    chosen = {
        "dtype": "float32" if check.is_dry else "bfloat16",
        "device": check.device,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": None if not check.is_dry else 64,
        "num_kv_blocks": 1 + num_seqs * per_request,
        "block_size": _BLOCK_SIZE,
        # Prompts that are measured again must be computed again.
        "enable_prefix_caching": False,
        "enforce_eager": is_eager,
        "async_scheduling": is_overlapped,
    }
    return LLM(model_folder(model), **(chosen | options))


def random_prompts(lengths: list[int]) -> list[list[int]]:
    # Below 200 there are ids in every vocabulary, and no special ones of these configs.
    return [torch.randint(3, 200, (length,)).tolist() for length in lengths]


def decode_steps(check: Check, llm: LLM, num_reqs: int, context: int) -> tuple[float, float]:
    """Seconds from one step to the next with `num_reqs` decoding requests: two medians.

    Read from the last of the requests, whose first token says that all prompts are done.
    """
    from lmscope import SamplingParams

    num_steps = 4 if check.is_dry else 40
    num_prefills = -(-num_reqs * context // llm.config.max_num_batched_tokens)
    num_tokens = 2 * num_steps + 4
    params = SamplingParams(
        temperature=0.0,
        # Those that were first go on until the last has been measured.
        max_tokens=num_tokens + 2 * num_prefills + 8,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = random_prompts([context] * num_reqs)
    streams = [llm.submit(prompt, params) for prompt in prompts]
    times = []
    for _ in streams[-1]:
        times.append(time.perf_counter())
        if len(times) == num_tokens:
            break
    for stream in streams:
        stream.abort()
    for stream in streams:
        stream.wait()
    steps = [after - before for before, after in itertools.pairwise(times)][2:]
    half = len(steps) // 2
    return statistics.median(steps[:half]), statistics.median(steps[half:])


def prefill_s(llm: LLM, length: int) -> float:
    from lmscope import SamplingParams

    (prompt,) = random_prompts([length])
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.submit(prompt, params).wait()
    return time.perf_counter() - began
