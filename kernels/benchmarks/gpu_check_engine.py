"""Items 6 to 8 of gpu_check.py: steps of the engine, a workload, and a trace.

Models have random weights, and everything goes through the public LLM.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_check_llm import decode_steps, load_engine, prefill_s, random_prompts, require_engine
from gpu_check_models import MODELS, TINY, Model, model_folder
from gpu_check_report import Check, Measurement, is_noise

__all__ = ["run_workload", "take_trace", "time_steps"]

_MAX_TRACE_BYTES = 16 << 20
# How far below the largest logit that of a token may be which is as good, in standard deviations
# of all logits: what rounding to bfloat16 adds up to.
_NEAR_TIE = 0.2
# What the items after the sixth take.
_KEPT_S = 50.0
# What CUDA and its libraries may keep of a GPU for the kernels and threads of a closed engine.
_KEPT_BYTES = 128 << 20


# --- 6: steps ------------------------------------------------------------------------------


def time_steps(check: Check) -> None:
    """Decode steps and prefills of each model; of the first also tokens, hidden syncs, memory and
    what watching costs, before the larger ones take their time."""
    require_engine()
    first, *others = (TINY,) if check.is_dry else MODELS
    # What overlapping adds to graphs shows where steps are shortest.
    for how in ("eager", "graphs", "overlapped"):
        _begin_model(check, first, how)
    for part in (_check_greedy, _check_syncs, _check_memory, _time_watching):
        if check.fits(6, part.__name__, 0 if check.is_dry else 10):
            check.attempt(6, part.__name__, partial(part, check, first))
    for model in others:
        for how in ("eager", "graphs"):
            _begin_model(check, model, how, kept_s=_KEPT_S)


def _begin_model(check: Check, model: Model, how: str, kept_s: float = 0.0) -> None:
    name = f"{model.name}, {how}"
    if check.fits(6, name, model.estimate_s / 2, kept_s):
        check.attempt(6, name, partial(_time_model, check, model, how))


def _time_model(check: Check, model: Model, how: str) -> None:
    context = 24 if check.is_dry else 1024
    is_eager = how == "eager"
    with load_engine(
        check, model, context, is_eager=is_eager, is_overlapped=how == "overlapped"
    ) as llm:
        kv_bytes = llm.config.kv_block_bytes / llm.config.block_size
        weight_bytes = _bytes_read_per_step(llm.module)
        for num_reqs, goal_ms in model.step_goals_ms.items():
            seconds = decode_steps(check, llm, num_reqs, context)
            check.measured(
                Measurement(
                    6,
                    f"{model.name}, {how}, decode step, R={num_reqs}, context {context}",
                    "ms",
                    (seconds[0] * 1e3, seconds[1] * 1e3),
                    _floor_ms(check, weight_bytes + num_reqs * context * kv_bytes),
                    # Only graphs are meant to reach it.
                    None if is_eager else goal_ms,
                )
            )
        length = 48 if check.is_dry else 2048
        times = [prefill_s(llm, length) * 1e3 for _ in range(3)][1:]
        flops = 2 * weight_bytes / 2 * length
        ceiling = check.ceilings.get("flops")
        check.measured(
            Measurement(
                6,
                f"{model.name}, {how}, prefill of {length}",
                "ms",
                (times[0], times[1]),
                flops / ceiling * 1e3 if ceiling else None,
                None if is_eager else model.prefill_goal_ms,
            )
        )


def _check_greedy(check: Check, model: Model) -> None:
    """Greedy tokens, each against what transformers gives for the tokens before it."""
    from transformers import AutoModelForCausalLM

    from lmscope import SamplingParams

    length, num_tokens = (12, 6) if check.is_dry else (64, 32)
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    with load_engine(check, model, length, is_eager=False) as llm:
        prompts = random_prompts([length] * 4)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        dtype = getattr(torch, llm.config.dtype)
    reference = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=dtype)
    reference = reference.to(check.device).eval()
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = torch.tensor(output.outputs[0].token_ids, device=check.device)
        known = torch.cat((torch.tensor(prompt, device=check.device), token_ids))
        with torch.inference_mode():
            logits = reference(known[None]).logits[0, length - 1 : -1].float()
        own = logits.gather(1, token_ids[:, None])[:, 0]
        gaps += ((logits.max(dim=1).values - own) / logits.std(dim=1)).tolist()
    num_equal = sum(gap == 0.0 for gap in gaps)
    # Of logits that have nothing to do with each other, the gap would be several deviations.
    check.found(
        6,
        f"greedy tokens of transformers, {model.name}",
        max(gaps) < _NEAR_TIE,
        f"{num_equal} of {len(gaps)} are the same, the others have logits at most "
        f"{max(gaps):.2g} standard deviations below",
    )


def _check_syncs(check: Check, model: Model) -> None:
    """Decode steps while torch raises at every wait for the device."""
    if check.is_dry:
        check.skipped(6, "no sync inside a step", "a CPU has nothing to wait for")
        return
    with load_engine(check, model, 128, is_eager=False) as llm:
        decode_steps(check, llm, 4, 128)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decode_steps(check, llm, 4, 128)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    check.found(6, "no sync inside a step", True)


def _check_memory(check: Check, model: Model) -> None:
    """A pool of what the largest step leaves, as without any option, and all of it back after."""
    before = _memory_bytes(check)
    with load_engine(check, model, 128, is_eager=False, num_kv_blocks=None) as llm:
        pool_bytes = llm.config.num_kv_blocks * llm.config.kv_block_bytes
        decode_steps(check, llm, 4, 24 if check.is_dry else 128)
    after = _memory_bytes(check)
    if check.is_dry:
        check.found(6, "the pool is sized", pool_bytes > 0)
        return
    check.found(
        6,
        "the pool is what is left",
        pool_bytes > 0.5 * before.free,
        f"{pool_bytes / 1e9:.1f} GB of {before.free / 1e9:.1f} free ones",
    )
    kept = before.free - after.free, after.allocated - before.allocated
    check.found(
        6,
        "all memory is back after close()",
        max(kept) < _KEPT_BYTES,
        f"{kept[0] / 1e6:.0f} MB of the device, {kept[1] / 1e6:.0f} MB in torch's tensors",
    )


class _Memory(NamedTuple):
    """Bytes: free on the device, and in tensors of this process."""

    free: int
    allocated: int


def _memory_bytes(check: Check) -> _Memory:
    if check.is_dry:
        return _Memory(0, 0)
    gc.collect()
    torch.cuda.empty_cache()
    return _Memory(torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated())


def _time_watching(check: Check, model: Model) -> None:
    """Steps while nobody looks, while every struct is kept, and while attention is measured."""
    from lmscope.boundary import BOUNDARIES

    num_reqs, context = (2, 24) if check.is_dry else (64, 1024)
    with load_engine(check, model, context, is_eager=False) as llm:
        alone = decode_steps(check, llm, num_reqs, context)
        kept: deque[Any] = deque(maxlen=10_000)
        subscriptions = [llm.tap.on(kind, kept.append) for kind in BOUNDARIES]
        watched = decode_steps(check, llm, num_reqs, context)
        for subscription in subscriptions:
            subscription.close()
        with llm.measure_attention():
            measured = decode_steps(check, llm, num_reqs, context)
    check.found(6, "listeners heard the steps", len(kept) > 0, f"{len(kept)} structs")
    for what, seconds, goal in (
        ("attached listeners", watched, 0.05),
        ("block mass", measured, 0.03),
    ):
        added = (seconds[0] / alone[0] - 1, seconds[1] / alone[1] - 1)
        note = "noise" if is_noise(alone, seconds) else ""
        name = f"{what}, {model.name}, R={num_reqs}, as a part of a step"
        check.measured(Measurement(6, name, "", added, goal=goal, note=note))


# --- 7: a workload -------------------------------------------------------------------------


def run_workload(check: Check) -> None:
    """256 requests of 100 to 1,024 tokens in and out: output tokens a second, twice."""
    require_engine()
    from lmscope import SamplingParams

    model = TINY if check.is_dry else MODELS[0]
    num_reqs, shortest, longest = (4, 3, 12) if check.is_dry else (256, 100, 1024)
    generator = random.Random(0)
    largest_id = min(10_000, model.config["vocab_size"] - 1)
    prompts = [
        [generator.randint(0, largest_id) for _ in range(generator.randint(shortest, longest))]
        for _ in range(num_reqs)
    ]
    params = [
        SamplingParams(
            temperature=0.6,
            ignore_eos=True,
            max_tokens=generator.randint(shortest, longest),
            detokenize=False,
        )
        for _ in range(num_reqs)
    ]
    num_tokens = sum(each.max_tokens or 0 for each in params)
    speeds = []
    with load_engine(check, model, 2 * longest, is_eager=False, is_overlapped=True) as llm:
        # Once unmeasured: graphs are captured when batches of their sizes first come.
        for number in range(3):
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if number:
                speeds.append(num_tokens / (time.perf_counter() - began))
            generated = sum(len(each.outputs[0].token_ids) for each in outputs)
            check.found(7, "every token came", generated == num_tokens, f"{generated} tokens")
    check.measured(
        Measurement(
            7,
            f"{num_reqs} requests, {model.name}, overlapped, {num_tokens} tokens out",
            "tok/s",
            (speeds[0], speeds[1]),
            floor=None if check.is_dry else 36_400.0,
            goal=None if check.is_dry else 22_000.0,
            is_more_better=True,
        )
    )


# --- 8: a trace ----------------------------------------------------------------------------


def take_trace(check: Check) -> None:
    """Three decode steps as a trace for chrome://tracing or Perfetto."""
    require_engine()
    from torch.profiler import ProfilerActivity, profile

    from lmscope.boundary import SchedulerOutput

    activities = [ProfilerActivity.CPU] + ([] if check.is_dry else [ProfilerActivity.CUDA])
    profiler = profile(activities=activities)
    path = check.out / "trace.json.gz"
    num_seen = 0

    def follow(_: SchedulerOutput) -> None:
        # Called on the engine's thread, which is the one whose operations are to be seen.
        nonlocal num_seen
        num_seen += 1
        if num_seen == 6:
            profiler.start()
        elif num_seen == 9:
            profiler.stop()
            profiler.export_chrome_trace(str(path))

    model = TINY if check.is_dry else MODELS[0]
    context = 24 if check.is_dry else 1024
    with load_engine(check, model, context, is_eager=False) as llm:
        with llm.tap.on(SchedulerOutput, follow) as subscription:
            decode_steps(check, llm, 1, context)
        if subscription.error is not None:
            raise subscription.error
    num_bytes = path.stat().st_size
    check.found(8, "trace of three decode steps", num_bytes > 0, f"{num_bytes} bytes")
    if num_bytes > _MAX_TRACE_BYTES:
        path.unlink()
        check.skipped(8, "trace.json.gz", f"{num_bytes} bytes are more than {_MAX_TRACE_BYTES}")


def _bytes_read_per_step(module: torch.nn.Module) -> float:
    """Bytes of the weights that a decode step reads: all, but an embedding that is no head."""
    every = sum(p.numel() * p.element_size() for p in module.parameters())
    embedding = module.get_input_embeddings().weight  # type: ignore[operator]  # a transformers model
    if module.get_output_embeddings().weight is embedding:  # type: ignore[operator]  # as above
        return every
    return every - embedding.numel() * embedding.element_size()


def _floor_ms(check: Check, num_bytes: float) -> float | None:
    bandwidth = check.ceilings.get("bytes")
    return num_bytes / bandwidth * 1e3 if bandwidth else None
