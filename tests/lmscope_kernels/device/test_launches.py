"""What launchers keep: checked once for tensors of one layout, and anew for any other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels import paged_decode, rms_norm, silu_mul, store_kv, unified_attention
from lmscope_kernels.launches import MOST_LAUNCHES, Launches, launch_key
from lmscope_kernels.paged_attention import paged_attention_reference

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DEVICE, ints, paged_batch, randn

T, H, K, D, S = 3, 4, 2, 64, 16


class Calls:
    """A call of each launcher, with tensors that are new in each of them.

    offset    where the first tensor begins, in elements beyond a multiple of 16 bytes
    """

    def rms_norm(self, offset=0):
        x, weight = shifted(offset, T, D), randn(D)
        out = rms_norm.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(out, rms_norm.rms_norm_reference(x, weight, 1e-5))

    def silu_mul(self, offset=0):
        gate_up = shifted(offset, T, 2 * D)
        torch.testing.assert_close(silu_mul.silu_mul(gate_up), silu_mul.silu_mul_reference(gate_up))

    def store_kv(self, offset=0, slots=(5, 31, 0)):
        key, value = shifted(offset, T, K, D), randn(T, K, D)
        caches, expected = ([torch.zeros(2, S, K, D, device=DEVICE) for _ in "kv"] for _ in "ab")
        slot_mapping = ints(list(slots), torch.int64)
        store_kv.store_kv(key, value, *caches, slot_mapping, check=True)
        store_kv.store_kv_reference(key, value, *expected, slot_mapping)
        assert all(map(torch.equal, caches, expected))

    def unified_attention(self, offset=0, blocks=None):
        batch = paged_batch([20], [T], K, D, S, torch.float32)
        query = shifted(offset, T, H, D)
        if blocks is not None:
            batch.block_table[0] = ints(list(blocks))
        given = (
            query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            0.125,
        )
        out = unified_attention.paged_attention(*given, check=True)
        expected = paged_attention_reference(*given)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)

    def paged_decode(self, offset=0, blocks=None):
        batch = paged_batch([20], [1], K, D, S, torch.float32)
        query = shifted(offset, 1, H, D)
        if blocks is not None:
            batch.block_table[0] = ints(list(blocks))
        out = paged_decode.paged_decode(
            query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            0.125,
            workspace=paged_decode.DecodeWorkspace.allocate(1, H, D, 2 * S, DEVICE),
            check=True,
        )
        expected, *_ = paged_decode.paged_decode_reference(
            query, batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, 0.125
        )
        torch.testing.assert_close(out, expected.float(), atol=1e-4, rtol=1e-4)


MODULES = {
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
    "store_kv": store_kv,
    "unified_attention": unified_attention,
    "paged_decode": paged_decode,
}


@pytest.fixture(params=MODULES)
def launcher(request, monkeypatch):
    """A launcher that has kept nothing yet: how to call it, and what it keeps."""
    kept = Launches()
    monkeypatch.setattr(MODULES[request.param], "_launches", kept)
    return getattr(Calls(), request.param), kept


def shifted(offset, *shape):
    """Random numbers that begin so many elements behind where an allocation does."""
    size = torch.Size(shape).numel()
    return randn(size + 16)[offset : offset + size].view(shape)


def test_new_tensors_of_a_known_layout_are_not_checked_again(launcher, monkeypatch):
    call, kept = launcher
    call()
    assert len(kept) == 1
    monkeypatch.setattr(Launches, "keep", lambda *_: pytest.fail("checked again"))

    call()


def test_an_address_between_multiples_of_16_bytes_is_refused_each_time(launcher):
    call, kept = launcher
    call()

    for _ in range(2):
        with pytest.raises(ValueError, match="must begin at a multiple of 16 bytes"):
            call(offset=1)

    call(offset=4)
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("store_kv", {"slots": (5, 32, 0)}, "row 1 of the batch goes to slot 32"),
        ("unified_attention", {"blocks": (1, 3)}, "request 0 of the batch has block 3"),
        ("paged_decode", {"blocks": (1, 3)}, "request 0 of the batch has block 3"),
    ],
)
def test_what_is_in_a_batch_is_checked_each_time(name, wrong, message):
    call = getattr(Calls(), name)
    call()

    with pytest.raises(ValueError, match=message):
        call(**wrong)


def test_a_tensor_that_changed_in_place_has_another_key():
    x = randn(4, 64)
    before = launch_key(x, None)
    assert launch_key(randn(4, 64), None) == before

    assert launch_key(x.t_(), None) != before
    assert launch_key(x.t_().half(), None) != before
    assert launch_key(x, x) != before
    assert launch_key(x, None) == before


def test_no_more_than_so_many_are_kept():
    kept = Launches()

    for key in range(MOST_LAUNCHES + 3):
        assert kept.keep(key, -key) == -key

    assert sorted(kept) == list(range(MOST_LAUNCHES, MOST_LAUNCHES + 3))
