"""Linear methods: what they compute, which weights they refuse, and how one is chosen."""

from __future__ import annotations

import ctypes
import platform

import pytest
import torch
from lmscope_kernels.half_linear_cpu import why_no_half_loops
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from lmscope.models import linear
from lmscope.models.linear import (
    Fp16PackedLinears,
    PlainLinears,
    SideBySideLinears,
    WeightAndBias,
    choose_linear_method,
)
from lmscope.models.swap import weight_and_bias

CPU = torch.device("cpu")
MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None) if platform.system() == "Linux" else None
needs_packed = pytest.mark.skipif(
    linear._why_not_fp16(torch.float32, CPU) is not None, reason="needs fbgemm on x86"
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["loops", "fbgemm"])
def method(request):
    """Weights in half precision, by the compiled loops and by torch."""
    if request.param == "loops" and why_no_half_loops() is not None:
        pytest.skip("needs the extra cpu")
    return Fp16PackedLinears(in_loops=request.param == "loops")


def choose(exact=False, dtype=torch.float32, device=CPU):
    return choose_linear_method(exact=exact, quantization=None, dtype=dtype, device=device)


def parts_of(outs, size, with_bias):
    return [
        WeightAndBias(torch.randn(out, size) * 0.1, torch.randn(out) if has_bias else None)
        for out, has_bias in zip(outs, with_bias, strict=True)
    ]


@needs_packed
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 17])
@pytest.mark.parametrize(
    ("outs", "size", "with_bias"),
    [
        ([49157], 96, [False]),
        ([9 * 64, 3 * 64, 3 * 64], 576, [False] * 3),
        ([7, 1, 3], 5, [True, False, True]),
        ([288, 288], 97, [True, True]),
    ],
    ids=["vocabulary", "heads", "odd", "bias"],
)
def test_packed_weights_lose_what_half_precision_loses(method, outs, size, with_bias, num_rows):
    parts = parts_of(outs, size, with_bias)
    rows = torch.randn(num_rows, size)

    got = method.pack(parts)(rows)

    wanted = torch.cat([F.linear(rows, w.half().float(), b) for w, b in parts], dim=-1)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(
        PlainLinears().pack(parts)(rows), torch.cat([F.linear(rows, *p) for p in parts], -1)
    )


@needs_packed
@pytest.mark.parametrize("num_rows", [1, 4, 5, 16, 33])
def test_a_weight_packed_beside_others_gives_the_same_bits_as_alone(method, num_rows):
    parts = parts_of([576, 192, 192], 576, [False, True, False])
    rows = torch.randn(num_rows, 576)

    together = method.pack(parts)(rows)

    assert torch.equal(together, torch.cat([method.pack([part])(rows) for part in parts], -1))


@needs_packed
@pytest.mark.parametrize(
    ("value", "reason"),
    [(65504.0, None), (-65520.0, "65520"), (float("inf"), "inf"), (float("nan"), "not a number")],
)
def test_a_weight_outside_half_precision_is_refused(value, reason):
    weight = torch.randn(700, 500)
    weight[-1, -1] = value

    refusal = Fp16PackedLinears().refusal(weight)

    assert refusal is None if reason is None else reason in (refusal or "")


@needs_packed
def test_small_weights_are_refused_when_there_is_nothing_beside_them():
    small = torch.full((40, 30), 3e-6)
    some_small = torch.randn(40, 30) * 0.02
    some_small[0, :3] = 3e-6

    refusal = Fp16PackedLinears().refusal(small)

    assert refusal is not None
    assert "1200 of 1200" in refusal
    # Zeros are small, and lose nothing.
    assert Fp16PackedLinears().refusal(torch.zeros(40, 30)) is None
    assert Fp16PackedLinears().refusal(some_small) is None
    # What is refused loses more than the rule allows, what is taken does not.
    for weight, is_refused in ((small, True), (some_small, False)):
        error = (weight.half().float() - weight).norm() / weight.norm()
        assert (float(error) > 2.0**-11) == is_refused


@needs_packed
@pytest.mark.parametrize("exponent", range(-20, 4))
@pytest.mark.parametrize("share", [0.0, 0.9, 0.9999])
def test_weights_of_any_size_are_refused_by_the_rule_as_it_is_written(exponent, share):
    weight = torch.randn(700, 500).clamp(-3, 3) * 2.0**exponent
    weight[torch.rand(weight.shape) < share] *= 2.0**-12

    refusal = Fp16PackedLinears().refusal(weight)

    num_small = int(((weight != 0) & (weight.abs() < 2.0**-14)).sum())
    lost, kept = num_small**0.5 * 2.0**-25, 2.0**-11 * float(weight.double().norm())
    assert (refusal is not None) == (lost > kept)


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2() returns, in bytes where it is not a count."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


def allocated_bytes() -> int:
    """What is allocated and not freed.

    Resident memory would not do: an allocation may get memory that an earlier one gave back.
    """
    assert MALLINFO is not None
    MALLINFO.restype = MallocInfo
    info = MALLINFO()
    return info.uordblks + info.hblkhd


@needs_packed
@pytest.mark.skipif(MALLINFO is None, reason="needs glibc's own count of what is allocated")
@pytest.mark.parametrize("num_inputs", [512, 576, 1030])
def test_packed_weights_take_the_memory_that_is_said(method, num_inputs):
    weight = torch.zeros(4_005, num_inputs)
    before = allocated_bytes()
    packed = method.pack([WeightAndBias(weight, None)])
    taken = allocated_bytes() - before

    assert taken == pytest.approx(method.packed_bytes(weight), rel=0.01)
    del packed


def test_exact_and_other_dtypes_get_f_linear_with_the_reason():
    exact = choose(exact=True)
    assert (exact.method.name, exact.why) == ("F.linear", "exact=True")
    for dtype, device, word in (
        (torch.bfloat16, CPU, "bfloat16"),
        (torch.float32, torch.device("meta"), "meta"),
    ):
        chosen = choose(dtype=dtype, device=device)
        assert chosen.method.name == "F.linear"
        assert word in chosen.why


def test_a_processor_or_torch_without_packed_weights_gets_f_linear(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "arm64")
        chosen = choose()
        assert (chosen.method.name, "arm64" in chosen.why) == ("F.linear", True)
        assert chosen.warning == "", "nothing else could be expected"

    class NoOps:
        pass

    monkeypatch.setattr(linear, "why_no_half_loops", lambda: "numba is not installed")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops, "quantized", NoOps())
    chosen = choose()
    assert chosen.method.name == "F.linear"
    assert "quantized.linear_prepack_fp16" in chosen.why
    assert chosen.warning == (
        "matrices are multiplied by F.linear, several times slower than packed weights: this build "
        "of torch has no quantized.linear_prepack_fp16, and numba is not installed"
    )


@needs_packed
def test_a_numba_that_does_not_run_is_said_with_what_runs_instead(monkeypatch):
    assert choose().warning == ""
    broken = "numba is installed and does not run (no LLVM)"
    for name in ("why_not_numba", "why_no_half_loops"):
        monkeypatch.setattr(linear, name, lambda: broken)
    monkeypatch.setattr(linear, "is_numba_installed", lambda: True)

    assert (
        choose().warning == f"{broken}, so torch computes what loops would, slower; reinstall numba"
    )

    monkeypatch.setattr(linear, "is_numba_installed", lambda: False)
    assert choose().warning == "", "an extra that was not installed is not missed"


@needs_packed
def test_who_multiplies_by_packed_weights_is_said_and_the_loops_need_nothing_of_torch(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(linear, "why_no_half_loops", lambda: "numba is not installed")
        chosen = choose()
        assert isinstance(chosen.method, Fp16PackedLinears)
        assert not chosen.method.in_loops
        assert "by torch, since numba is not installed" in chosen.why
    monkeypatch.setattr(linear, "why_no_half_loops", lambda: None)
    monkeypatch.setattr(torch.ops, "quantized", object())
    chosen = choose()
    assert isinstance(chosen.method, Fp16PackedLinears)
    assert chosen.method.in_loops
    assert "by compiled loops" in chosen.why


@pytest.mark.parametrize("with_bias", [[False] * 3, [True, False, True]])
def test_matrices_side_by_side_are_the_weights_themselves(with_bias):
    parts = parts_of([6, 2, 2], 8, with_bias)
    rows = torch.randn(3, 8)
    wanted = torch.cat([F.linear(rows, *part) for part in parts], dim=-1)

    with torch.inference_mode():  # which packing is in
        got = SideBySideLinears().pack(parts)
        again = SideBySideLinears().pack(parts)
    torch.testing.assert_close(got(rows), wanted)
    torch.testing.assert_close(again(rows), wanted)
    places = {part.weight.untyped_storage().data_ptr() for part in parts}
    assert len(places) == 1

    before = parts[1].weight._version
    with torch.no_grad():
        parts[1].weight.mul_(2.0)
    assert parts[1].weight._version > before
    changed = torch.cat([F.linear(rows, *part) for part in parts], dim=-1)
    torch.testing.assert_close(got(rows), changed)
    torch.testing.assert_close(again(rows), changed)


def test_a_module_whose_weights_lie_side_by_side_is_saved_as_it_was(tmp_path):
    module = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for layer in module.model.layers:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        SideBySideLinears().pack([weight_and_bias(each) for each in projections])
    module.save_pretrained(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()

    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_gpu_multiplies_by_matrices_side_by_side():
    chosen = choose(dtype=torch.bfloat16, device=torch.device("cuda"))

    assert isinstance(chosen.method, SideBySideLinears)
    assert chosen.method.refusal(torch.zeros(1, 1)) is None
    assert chosen.method.packed_bytes(torch.zeros(1, 1)) == 0
