"""What a layer does to rows between its products: the loops against the definitions."""

from __future__ import annotations

import importlib
import importlib.util
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from lmscope_kernels import layer_rows_cpu
from lmscope_kernels.layer_rows_cpu import (
    NO_NORM,
    NO_ROTARY,
    NO_SOFTCAP,
    add_norm_reference,
    layer_loops,
    rotate_and_store_reference,
    rows_norm,
    silu_mul_reference,
)
from lmscope_kernels.paged_attention import paged_attention_reference

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)

# (query heads, KV heads, head size); without positions a head may have an odd size
SHAPES = [(9, 3, 64), (4, 4, 96), (8, 2, 80), (6, 1, 20)]
BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["parallel", "serial"])
def loops(request, monkeypatch):
    if request.param == "serial":
        monkeypatch.setattr(layer_rows_cpu, "use_torch_threads", lambda: False)
    return layer_loops()


@contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def norm_of(size):
    return rows_norm(torch.randn(size) + 1, 1e-5)


def assert_near(got, wanted):
    torch.testing.assert_close(got, wanted, atol=2e-6 * float(wanted.abs().max()), rtol=0)


def run_add_norm(loops, hidden, new, new_norm, multiplier, norm):
    hidden, output = hidden.clone(), torch.full_like(hidden, torch.nan)
    added = hidden[:0] if new is None else new
    loops.add_norm(
        hidden.numpy(), added.numpy(), *new_norm, np.float32(multiplier), *norm, output.numpy()
    )
    return hidden, output


@pytest.mark.parametrize("size", [576, 97, 7])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_new_norm", [True, False])
@pytest.mark.parametrize("has_new", [True, False])
def test_add_norm_equals_its_definition(loops, has_new, has_new_norm, has_norm, size):
    hidden, new = torch.randn(5, size), torch.randn(5, size) if has_new else None
    new_norm = norm_of(size) if has_new_norm else NO_NORM
    norm = norm_of(size) if has_norm else NO_NORM

    got, output = run_add_norm(loops, hidden, new, new_norm, 0.7, norm)

    wanted_hidden = hidden.clone()
    wanted = add_norm_reference(wanted_hidden, new, new_norm, 0.7, norm)
    assert_near(got, wanted_hidden)
    if has_norm:
        assert_near(output, wanted)
    else:
        assert output.isnan().all()


def test_a_row_of_zeros_without_an_epsilon_is_no_number_as_in_torch_and_no_error(loops):
    hidden = torch.stack([torch.zeros(8), torch.ones(8)])
    norm = rows_norm(torch.ones(8), 0.0)

    _, output = run_add_norm(loops, hidden, None, NO_NORM, 1.0, norm)

    torch.testing.assert_close(
        output, add_norm_reference(hidden, None, NO_NORM, 1.0, norm), equal_nan=True
    )
    assert output[0].isnan().all()


@pytest.mark.parametrize("size", [1536, 61, 3])
def test_silu_mul_equals_its_definition(loops, size):
    gate_up = 20 * torch.randn(5, 2 * size)
    output = torch.empty(5, size)

    loops.silu_mul(gate_up.numpy(), output.numpy())

    assert_near(output, silu_mul_reference(gate_up))


def test_silu_of_what_is_far_from_zero_is_finite_and_nan_stays(loops):
    gate_up = torch.tensor([[-1e4, -90.0, 1e4, torch.nan, 1.0, 1.0, 1.0, 1.0]])
    output = torch.empty(1, 4)

    loops.silu_mul(gate_up.numpy(), output.numpy())

    assert output[0, :3].tolist() == pytest.approx([0, 0, 1e4], abs=1e-30)
    assert output[0, 3].isnan()


class Step:
    """Requests of which some have one row and one has three, over a cache of random numbers."""

    query_lens, seq_lens = (1, 3, 1, 1), (9, 3, 70, 1)

    def __init__(self, num_heads, num_kv_heads, head_size, norms="", is_rotated=True):
        H, K, D = self.shape = num_heads, num_kv_heads, head_size
        num_blocks = -(-max(self.seq_lens) // BLOCK_SIZE)
        self.table = (1 + torch.randperm(4 * num_blocks, dtype=torch.int32)).view(4, num_blocks)
        self.positions = torch.tensor([8, 0, 1, 2, 69, 0])
        request = torch.tensor([0, 1, 1, 1, 2, 3])
        blocks = self.table[request, self.positions // BLOCK_SIZE].long()
        self.slots = blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        shape = (4 * num_blocks + 1, BLOCK_SIZE, K, D)
        self.caches = torch.randn(shape), torch.randn(shape)
        self.heads = torch.randn(6, (H + 2 * K) * D)
        sizes = {"": None, "heads": (D, D), "sides": (H * D, K * D)}[norms]
        self.norms = (NO_NORM, NO_NORM) if sizes is None else tuple(map(norm_of, sizes))
        angle = torch.randn(6, 1, D)
        sine = angle.sin()
        sine[..., : D // 2].neg_()
        self.rotary = (angle.cos(), sine) if is_rotated else None
        self.decoding = np.array([0, 2, 3])
        self.rows = np.array([0, 4, 5])

    def run(self, loops, members=(0, 1, 2, 3, 4, 5), num_parts=1):
        """The rows `members`: heads, output and caches."""
        H, _, D = self.shape
        members = list(members)
        heads, caches = self.heads[members].clone(), [cache.clone() for cache in self.caches]
        output = torch.full((len(members), H * D), torch.nan)
        rotary = (
            [NO_ROTARY] * 2 if self.rotary is None else [x[members].numpy() for x in self.rotary]
        )
        attended = [i for i, row in enumerate(self.rows) if row in members]
        requests = self.decoding[attended]
        own_caches = [cache.numpy() for cache in caches]
        loops.store(
            heads.numpy(),
            H,
            *self.norms[0],
            *self.norms[1],
            *rotary,
            self.slots[members].numpy(),
            *own_caches,
        )
        loops.attend(
            num_parts,
            heads.numpy(),
            H,
            *own_caches,
            np.ascontiguousarray(self.table.numpy()[requests]),
            np.zeros(len(requests), np.int32),
            np.array(self.seq_lens, np.int32)[requests],
            np.array([members.index(row) for row in self.rows[attended]], np.int64),
            np.float32(0.3),
            NO_SOFTCAP,
            output.numpy(),
        )
        return heads, output, caches


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize("norms", ["", "heads", "sides"])
@pytest.mark.parametrize("shape", SHAPES)
def test_storing_and_attending_equal_their_definitions(loops, shape, norms, is_rotated):
    step = Step(*shape, norms, is_rotated)
    H, _, D = shape

    heads, output, caches = step.run(loops)

    wanted_caches = [cache.clone() for cache in step.caches]
    wanted = rotate_and_store_reference(
        step.heads, H, step.norms, step.rotary, step.slots, *wanted_caches
    )
    assert_near(heads, wanted)
    for got, expected in zip(caches, wanted_caches, strict=True):
        assert_near(got, expected)
    attended = paged_attention_reference(
        wanted[step.rows, : H * D].view(-1, H, D),
        *wanted_caches,
        step.table[step.decoding],
        torch.tensor(step.seq_lens)[step.decoding],
        torch.arange(4),
        0.3,
    )
    torch.testing.assert_close(output[step.rows], attended.flatten(1), atol=2e-5, rtol=0)
    assert output[1:4].isnan().all()


def test_heads_of_odd_size_without_positions(loops):
    step = Step(6, 2, 7, is_rotated=False)

    heads, _, caches = step.run(loops)

    assert torch.equal(heads, step.heads)
    stored = caches[0].flatten(0, 1)[step.slots]
    assert torch.equal(stored.flatten(1), step.heads[:, 42:56])


@pytest.mark.parametrize("norms", ["", "heads", "sides"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others(loops, norms, num_threads):
    step = Step(9, 3, 64, norms)
    new, norm = torch.randn(6, 576), norm_of(576)
    hidden, gate_up = torch.randn(6, 576), torch.randn(6, 2 * 1531)
    activated = torch.empty(6, 1531)
    with torch_threads(num_threads):
        layer_loops()
        together = step.run(loops), run_add_norm(loops, hidden, new, norm, 0.7, norm)
        loops.silu_mul(gate_up.numpy(), activated.numpy())

    with torch_threads(1):
        layer_loops()
        for row in range(6):
            own = slice(row, row + 1)
            heads, output, _ = step.run(loops, [row], num_parts=3)
            assert torch.equal(heads, together[0][0][own])
            assert torch.equal(output.nan_to_num(), together[0][1][own].nan_to_num())
            alone = run_add_norm(loops, hidden[own], new[own], norm, 0.7, norm)
            assert torch.equal(alone[0], together[1][0][own])
            assert torch.equal(alone[1], together[1][1][own])
            one = torch.empty(1, 1531)
            loops.silu_mul(gate_up[own].numpy(), one.numpy())
            assert torch.equal(one, activated[own])


def test_the_activation_is_compiled_to_vector_instructions():
    kernels = importlib.import_module("lmscope_kernels.layer_rows_numba")
    kernels._silu_mul(np.ones(64, np.float32), np.ones(32, np.float32))

    (code,) = kernels._silu_mul.inspect_llvm().values()

    # A division that may raise ends the loop early, and such a loop stays scalar.
    assert re.search(r"fdiv[a-z ]* <\d+ x float>", code)
