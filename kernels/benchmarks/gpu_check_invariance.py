"""Bits that must not depend on the batch, item 4 of gpu_check.py, and what they cost, in 5 and 6.

Kernels first, then an engine with batch_invariant=True. What each request says alone, its tokens
and log probabilities, it must say in batches of 2 to 256, cut into chunks of 40 and 56, preempted
and behind a cached prefix, in graphs and without. On a CPU the engine is that of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import gpu_check_kernels
import torch
from gpu_check_batches import SHAPES, Shape
from gpu_check_llm import decode_steps, load_engine, prefill_s, random_prompts, require_engine
from gpu_check_models import MODELS, TINY
from gpu_check_report import Check, Measurement
from gpu_check_times import times_s
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from lmscope import LLM, RequestOutput, SamplingParams

__all__ = ["check_invariance", "time_engine", "time_matmul"]

_ENGINE_S = 60.0
_PRICE_S = 45.0


# --- 4: bits -------------------------------------------------------------------------------


def check_invariance(check: Check) -> None:
    """Rows of kernels, then requests of an engine."""
    gpu_check_kernels.check_invariance(check)
    for shape in SHAPES[:1] if check.is_dry else SHAPES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for part in (_check_matmul, _check_log_softmax):
                name = f"{part.__name__}, {shape.name}, {dtype}"
                check.attempt(4, name, partial(part, check, shape, dtype))
    name = "batch-invariant engine"
    if check.fits(4, name, 0 if check.is_dry else _ENGINE_S):
        check.attempt(4, name, partial(_check_engine, check))


def _check_matmul(check: Check, shape: Shape, dtype: torch.dtype) -> None:
    from lmscope_kernels import batch_invariant_matmul as file

    multiply = (
        file.batch_invariant_matmul_reference if check.is_dry else file.batch_invariant_matmul
    )
    size = shape.intermediate_size
    rows, weight, bias = (
        torch.randn(each, device=check.device).to(dtype)
        for each in ((300, size), (shape.hidden_size, size), (shape.hidden_size,))
    )
    _check_rows(
        check,
        f"batch_invariant_matmul, {shape.name}, {dtype}",
        lambda some: multiply(some, weight, bias),
        rows,
        F.linear(rows.double(), weight.double(), bias.double()),
        gpu_check_kernels.LIMITS[dtype],
    )


def _check_log_softmax(check: Check, shape: Shape, dtype: torch.dtype) -> None:
    from lmscope_kernels import log_softmax as file

    run = file.log_softmax_reference if check.is_dry else file.log_softmax
    # Rows of an odd length, each of which begins elsewhere between two multiples of 16.
    logits = (3 * torch.randn(300, shape.vocab_size + 1, device=check.device)).to(dtype)
    name = f"log_softmax, {shape.name}, {dtype}"
    _check_rows(check, name, run, logits, logits.double().log_softmax(dim=-1), 1e-5)


def _check_rows(
    check: Check,
    name: str,
    run: Callable[[Tensor], Tensor],
    rows: Tensor,
    expected: Tensor,
    limit: float,
) -> None:
    """That the result is near `expected`, and that of some rows the same as among all."""
    whole = run(rows)
    error = float((whole.double() - expected).norm() / expected.norm())
    check.found(4, f"{name}: right", error < limit, f"error {error:.2g}, limit {limit:.0e}")
    parts = ((0, 1), (7, 9), (63, 65), (100, 300), (299, 300))
    is_equal = [torch.equal(run(rows[a:b]), whole[a:b]) for a, b in parts]
    check.found(
        4, f"{name}: rows in any company", all(is_equal), f"{sum(is_equal)} of {len(parts)}"
    )


def _check_engine(check: Check) -> None:
    require_engine()
    sizes = (2, 6) if check.is_dry else (2, 16, 64, 256)
    num_reqs = sizes[-1]
    lengths = [_WHOLE, _BEFORE, *[_SHORT] * 4]
    lengths += [1 + 37 * number % _WHOLE for number in range(len(lengths), num_reqs)]
    prompts = random_prompts(lengths)
    for number in range(0, num_reqs, 3):
        shared = min(lengths[number], 40)
        prompts[number][:shared] = prompts[0][:shared]
    params = [_params(number) for number in range(num_reqs)]
    options: dict[str, Any] = {
        "batch_invariant": True,
        "max_num_seqs": num_reqs,
        "num_kv_blocks": 1 + num_reqs * (_WHOLE // 16 + 1),
    }
    if check.is_dry:
        options |= {"threads": 1, "max_num_batched_tokens": 128}
    model = TINY if check.is_dry else MODELS[0]
    with load_engine(check, model, _WHOLE, is_eager=False, **options) as llm:
        alone = [_said(llm, [each], [own])[0] for each, own in zip(prompts, params, strict=True)]

        def compare(name: str, engine: LLM, numbers: Sequence[int]) -> None:
            said = _said(engine, [prompts[n] for n in numbers], [params[n] for n in numbers])
            num_equal = sum(a == alone[n] for a, n in zip(said, numbers, strict=True))
            note = f"{num_equal} of {len(numbers)} say the same"
            check.found(4, f"engine, {model.name}, {name}", num_equal == len(numbers), note)

        for size in sizes:
            compare(f"batch of {size}", llm, range(size))
        for case in _CASES:
            with llm.like(enforce_eager=not check.is_dry, **case.options) as other:
                has_seen = _watch(other, case.has_happened)
                for turn in ("", ", again"):
                    compare(case.name + turn, other, case.numbers)
                check.found(4, f"engine, {model.name}, {case.name}: it came to that", any(has_seen))


class _Case(NamedTuple):
    """An engine that does something else to requests: to whom, and whether a step did it."""

    name: str
    numbers: tuple[int, ...]
    options: dict[str, Any]
    has_happened: Callable[[Any], bool]


# Tokens of the first prompts. Of the first, 40 fit into the step that the second begins in, and
# four short ones need a second block of 16 each while they decode.
_WHOLE, _BEFORE, _SHORT = 96, 56, 14
_CASES = (
    _Case(
        "chunks of 40 and 56",
        (1, 0),
        {"max_num_batched_tokens": _BEFORE + 40, "max_num_seqs": 2},
        lambda step: 40 in step.num_scheduled_tokens.values(),
    ),
    _Case(
        "preempted",
        (2, 3, 4, 5),
        {"num_kv_blocks": 1 + 6, "max_num_batched_tokens": 64, "max_num_seqs": 4},
        lambda step: len(step.preempted_req_ids) > 0,
    ),
    _Case(
        "cached prefixes",
        (0, 1, 2, 3, 4, 5),
        {"enable_prefix_caching": True},
        lambda step: any(new.num_computed_tokens for new in step.scheduled_new_reqs),
    ),
)


def _watch(llm: LLM, has_happened: Callable[[Any], bool]) -> list[bool]:
    """Of each step from now on, whether it did that."""
    from lmscope.boundary import SchedulerOutput

    seen: list[bool] = []
    llm.tap.on(SchedulerOutput, lambda step: seen.append(has_happened(step)))
    return seen


def _params(number: int) -> SamplingParams:
    """Greedy, drawn, filtered and penalised, with and without log probabilities."""
    from lmscope import SamplingParams

    return SamplingParams(
        temperature=0.8 if number % 2 else 0.0,
        top_p=0.9 if number % 4 == 1 else 1.0,
        top_k=40 if number % 8 == 3 else -1,
        seed=number,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        logprobs=3 if number % 3 == 0 else None,
        repetition_penalty=1.2 if number % 5 == 4 else 1.0,
    )


def _said(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Tokens and log probabilities of each request, as numbers that must be equal."""

    def numbers(output: RequestOutput) -> Any:
        completion = output.outputs[0]
        return completion.token_ids, [
            {token: each.logprob for token, each in table.items()}
            for table in completion.logprobs or []
        ]

    return [numbers(each) for each in llm.generate(prompts, params, use_tqdm=False)]


# --- 5 and 6: what it costs ----------------------------------------------------------------


def time_matmul(check: Check) -> None:
    """The product of fixed tiles beside torch's own, where a step has so many rows."""
    for shape in SHAPES[:1] if check.is_dry else SHAPES[1:]:
        for num_rows in (1, 2) if check.is_dry else (1, 64, 2048):
            name = f"batch_invariant_matmul, {shape.name}, gate and up, T={num_rows}"
            check.attempt(5, name, partial(_time_product, check, name, shape, num_rows))


def _time_product(check: Check, name: str, shape: Shape, num_rows: int) -> None:
    from lmscope_kernels import batch_invariant_matmul as file

    multiply = (
        file.batch_invariant_matmul_reference if check.is_dry else file.batch_invariant_matmul
    )
    size, num_outputs = shape.hidden_size, 2 * shape.intermediate_size
    weights = [torch.randn(num_outputs, size, device=check.device).bfloat16() for _ in range(4)]
    rows = torch.randn(num_rows, size, device=check.device).bfloat16()
    own, plain = (
        times_s(check, [partial(call, rows, each) for each in weights])
        for call in (multiply, F.linear)
    )
    num_bytes = 2 * (num_outputs * size + num_rows * (size + num_outputs))
    bandwidth, flops = check.ceilings.get("bytes"), check.ceilings.get("flops")
    floor = None
    if bandwidth and flops:
        floor = max(num_bytes / bandwidth, 2 * num_rows * size * num_outputs / flops) * 1e6
    check.measured(
        Measurement(
            5,
            name,
            "us",
            (own[0] * 1e6, own[1] * 1e6),
            floor,
            note=f"F.linear takes {sum(plain) / 2 * 1e6:.1f}",
        )
    )


def time_engine(check: Check) -> None:
    """Steps of a batch-invariant engine, each as a multiple of one that is not."""
    require_engine()
    model = TINY if check.is_dry else MODELS[0]
    name = f"batch-invariant steps, {model.name}"
    if check.fits(6, name, 0 if check.is_dry else _PRICE_S):
        check.attempt(6, name, partial(_time_price, check))


def _time_price(check: Check) -> None:
    model = TINY if check.is_dry else MODELS[0]
    context, length = (24, 48) if check.is_dry else (1024, 2048)
    seconds: list[dict[str, tuple[float, float]]] = []
    for is_invariant in (False, True):
        with load_engine(
            check, model, context, is_eager=False, batch_invariant=is_invariant
        ) as llm:
            own = {
                f"decode step, R={num_reqs}, context {context}": decode_steps(
                    check, llm, num_reqs, context
                )
                for num_reqs in model.step_goals_ms
            }
            prefill_s(llm, length)  # compiles
            own[f"prefill of {length}"] = prefill_s(llm, length), prefill_s(llm, length)
            seconds.append(own)
    for name, default in seconds[0].items():
        invariant = seconds[1][name]
        check.measured(
            Measurement(
                6,
                f"batch-invariant, {model.name}, {name}, as a multiple of the default",
                "",
                (invariant[0] / default[0], invariant[1] / default[1]),
                note=f"{sum(invariant) * 5e2:.3g} ms against {sum(default) * 5e2:.3g}",
            )
        )
