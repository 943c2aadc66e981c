"""Batch-invariant engines with the Triton back end: the tokens of torch, each row by one path.

That bits are the same in any batch only a GPU can show, and test_gpu_invariant.py asks one: NumPy's
products, which the interpreter takes, depend on where in a tile a row stands. What it can show is
that a row alone and a row among others run the same kernels, compiled for the same, and that
between them torch does nothing but single operations on single numbers; and bits, where rows keep
their places.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmscope import SamplingParams
from lmscope.models.kernel_invariant import KernelInvariantForward

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import GREEDY, IS_INTERPRETED, MIXED, A, Run

INVARIANT = {"batch_invariant": True}
LOGPROBS = [
    each.replace(max_tokens=5, logprobs=4, prompt_logprobs=2 if row == 2 else None)
    for row, each in enumerate(MIXED)
]
# What torch may do to the rows of a forward: move them, and these, number by number.
MOVES = {
    "alias", "as_strided", "cat", "clone", "copy_", "detach", "embedding", "empty", "empty_like",
    "empty_strided", "expand", "index_select", "new_empty", "new_empty_strided", "reshape", "roll",
    "select", "set_", "slice", "split", "t", "unsqueeze", "view", "_to_copy", "_unsafe_view",
}  # fmt: skip
SINGLE = {"add_", "div_", "mul", "mul_"}


def until_one_ends_first(params: list[SamplingParams]) -> list[SamplingParams]:
    """Lengths with which PROMPTS, at 24 tokens a step, decode by four and then by three."""
    return [p.replace(max_tokens=most) for p, most in zip(params, (5, 3, 4, 3), strict=True)]


class Launches:
    """Stands in the place of a kernel and notes what it is compiled for."""

    def __init__(self, name: str, kernel: Any, noted: set[Any]) -> None:
        self.name, self.kernel, self.noted = name, kernel, noted
        self.plain = set(_not_specialized(kernel))

    def __getitem__(self, grid: Any) -> Any:
        launch = self.kernel[grid]

        def call(*arguments: Any, **keywords: Any) -> Any:
            named = dict(zip(self.kernel.arg_names, arguments, strict=False)) | keywords
            facts = tuple((key, self._fact(key, value)) for key, value in sorted(named.items()))
            self.noted.add((self.name, facts))
            return launch(*arguments, **keywords)

        return call

    def _fact(self, name: str, value: Any) -> Any:
        """As Triton tells arguments apart."""
        if isinstance(value, Tensor):
            is_aligned = name in self.plain or value.data_ptr() % 16 == 0
            return value.dtype, is_aligned
        if isinstance(value, float) or (name in self.plain and isinstance(value, int)):
            return type(value)
        is_constant = name.isupper() or not isinstance(value, int) or name.startswith("num_w")
        return value if is_constant else (value == 1, value % 16 == 0)


def _not_specialized(kernel: Any) -> list[str]:
    known = kernel.kwargs if IS_INTERPRETED else vars(kernel)
    return known.get("do_not_specialize") or []


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What all kernels were compiled for; clear it between two engines."""
    noted: set[Any] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("lmscope_kernels."):
            for attribute, value in list(vars(module).items()):
                if attribute.endswith("_kernel") and hasattr(value, "arg_names"):
                    monkeypatch.setattr(module, attribute, Launches(attribute, value, noted))
    return noted


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What torch was asked to do in forwards, beside launching kernels."""
    seen: set[str] = set()

    class Note(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    forward = KernelInvariantForward.__call__

    def noted(self: Any, *arguments: Any) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            return forward(self, *arguments)  # the proof of a body, which attends in torch
        with Note():
            return forward(self, *arguments)

    monkeypatch.setattr(KernelInvariantForward, "__call__", noted)
    return seen


def test_chunks_decodes_preemptions_and_draws_give_the_tokens_of_torch(model_folder, in_flight):
    folder = model_folder("llama")
    expected = Run(folder, "torch", MIXED)
    run = Run(folder, "triton", MIXED, async_scheduling=True, **INVARIANT)

    assert run.tokens == expected.tokens
    assert run.plan.body.what == "batch-invariant forward"
    assert "one Triton kernel, in one tile" in run.plan.attention.what
    assert "fixed tiles" in run.plan.linears.what
    assert run.num_preemptions > 0
    assert any(1 < n < 12 for each in run.scheduled for n in each.num_scheduled_tokens.values())


def test_a_row_alone_and_rows_in_padded_batches_run_the_same_kernels(
    model_folder, launches, operations, graphs
):
    """Four requests, one in two chunks, then three in a batch of four; and that one by itself."""
    folder = model_folder("llama", attention_bias=True)
    params = until_one_ends_first(MIXED)
    options = {"num_kv_blocks": 60, **INVARIANT}
    together = Run(folder, "triton", params, max_num_batched_tokens=24, **options)
    of_all = set(launches)
    launches.clear()
    alone = Run(folder, "triton", params[2:3], prompts=[[*A[:17], 60, 61, 62]], **options)

    assert (4,) in graphs
    # Its draw has all filters; one without any adds nothing up, so a kernel more makes no bits.
    has_no_filter = {each for each in of_all if ("HAS_TOP_P", False) in each[1]}
    assert {name for name, _ in has_no_filter} == {"draw_kernel"}
    assert launches == of_all - has_no_filter
    # Not compiled anew for one row or for sixteen.
    by_rows = [dict(facts)["num_rows"] for _, facts in of_all if "num_rows" in dict(facts)]
    assert len(by_rows) > 3
    assert set(by_rows) == {int}
    names = {name for name, _ in of_all}
    assert names >= {
        "batch_invariant_matmul_kernel", "draw_kernel", "paged_attention_kernel", "rms_norm_kernel",
        "silu_mul_kernel", "store_kv_kernel",
    }  # fmt: skip
    assert "split_kernel" not in names
    assert sum(name == "paged_attention_kernel" for name, _ in of_all) == 1
    assert operations - MOVES <= SINGLE
    assert alone.tokens == together.tokens[2:3]


def test_the_default_mode_does_run_other_kernels(model_folder, launches):
    """The companion: decoding rows have a kernel of their own, and one row a tile of its own."""
    folder = model_folder("llama")
    Run(folder, "triton", GREEDY[:1], prompts=[[3, 4, 5]], max_num_batched_tokens=8)

    names = [name for name, _ in launches]
    assert "split_kernel" in names
    assert "batch_invariant_matmul_kernel" not in names


def test_log_probabilities_are_those_of_torch_and_do_not_change_what_is_drawn(
    model_folder, in_flight
):
    folder = model_folder("qwen3")
    roomy = {"num_kv_blocks": 60}
    expected = Run(folder, "torch", LOGPROBS, **roomy)
    run = Run(folder, "triton", LOGPROBS, async_scheduling=True, **roomy, **INVARIANT)
    without = [each.replace(logprobs=None, prompt_logprobs=None) for each in LOGPROBS]
    plain = Run(folder, "triton", without, async_scheduling=True, **roomy, **INVARIANT)

    assert run.tokens == expected.tokens == plain.tokens
    for mine, other in zip(run.logprobs, expected.logprobs, strict=True):
        for position, wanted in zip(mine, other, strict=True):
            for token_id, logprob in wanted.items():
                assert position[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-3)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the stand-in for graphs is for a CPU")
def test_rows_that_fill_up_a_batch_change_no_bit(model_folder, graphs, monkeypatch):
    folder = model_folder("llama", vocab_size=101)
    params = until_one_ends_first(LOGPROBS)
    options = {"num_kv_blocks": 60, "max_num_batched_tokens": 24, **INVARIANT}
    padded = Run(folder, "triton", params, **options)
    assert (4,) in graphs
    monkeypatch.setattr("lmscope.execute.cuda_graphs.DecodeGraphs.padded", lambda *_: None)
    graphs.clear()
    plain = Run(folder, "triton", params, **options)

    assert graphs == []
    assert padded.tokens == plain.tokens
    assert padded.logprobs == plain.logprobs
    assert padded.prompt_logprobs == plain.prompt_logprobs


def test_prefixes_that_are_there_already_give_the_same_tokens(model_folder):
    folder = model_folder("llama")
    short = [GREEDY[0].replace(max_tokens=4)] * 3
    roomy = {"num_kv_blocks": 40, "max_num_seqs": 1}
    prompts = [A, A, [*A[:16], 8, 9]]
    expected = Run(folder, "torch", short, prompts=prompts, **roomy)
    run = Run(folder, "triton", short, prompts=prompts, **roomy, **INVARIANT)

    assert run.tokens == expected.tokens
    firsts = [new for each in run.scheduled for new in each.scheduled_new_reqs]
    assert [each.num_computed_tokens for each in firsts] == [0, 16, 16]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs_to_the_end(model_folder, dtype):
    """Tokens may differ where logits nearly tie, so only that they come is asked here; that the
    forward is right in each type is in test_kernel_forward.py."""
    params = [each.replace(max_tokens=3) for each in GREEDY[:2]]
    run = Run(
        model_folder("qwen3"), "triton", params, prompts=[A[:5], [77]], dtype=dtype, **INVARIANT
    )

    assert [len(each) for each in run.tokens] == [3, 3]
    assert str(run.plan.dtype) == dtype


@pytest.mark.skipif(not IS_INTERPRETED, reason="the torch path measures on a CPU only")
def test_attention_is_measured_beside_the_same_path(model_folder, graphs, launches):
    """Keys are read once more, without graphs: the decode kernel, which could say, must not run."""
    folder = model_folder("llama")
    options = {"num_kv_blocks": 60, "measures": True}
    short = [GREEDY[0].replace(max_tokens=4)] * 4
    expected = Run(folder, "torch", short, **options)
    launches.clear()
    run = Run(folder, "triton", short, **options, **INVARIANT)

    assert run.tokens == expected.tokens
    assert "split_kernel" not in {name for name, _ in launches}
    assert graphs == []
    for mine, other in zip(run.ran, expected.ran, strict=True):
        assert mine.attention_mass.keys() == other.attention_mass.keys()
        for request_id, shares in other.attention_mass.items():
            assert mine.attention_mass[request_id] == pytest.approx(shares, abs=1e-5)
