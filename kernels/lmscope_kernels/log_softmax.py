"""Log probabilities of each row of logits, with the same bits whatever rows stand beside it.

    out = (x - largest) - log(sum of exp(x - largest))

One program a row, which goes over it from its beginning in steps of fixed length: each lane adds up
what it meets, and at the end the lanes are added up. Where in memory a row begins does not matter:
nothing is compiled for rows that begin at good places, as torch's own does, which adds up from
there.

R rows, V vocabulary.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from lmscope_kernels.shapes import check_shape
from lmscope_kernels.triton_support import (
    DTYPES,
    INTERPRET,
    check_tensors,
    jit,
    require_triton,
    tl,
)

__all__ = ["BLOCK", "NUM_WARPS", "log_softmax", "log_softmax_kernel", "log_softmax_reference"]

# Numbers of one turn of the loop. The interpreter pays for each turn and not for its size.
BLOCK = 65536 if INTERPRET else 4096
NUM_WARPS = 8


def log_softmax_reference(logits: Tensor) -> Tensor:
    """The definition, in float64: [R, V] becomes [R, V] float32."""
    return logits.double().log_softmax(dim=-1).float()


@jit(do_not_specialize=["out_ptr", "logits_ptr", "logits_stride", "vocab_size"])
def log_softmax_kernel(out_ptr, logits_ptr, logits_stride, vocab_size, BLOCK: tl.constexpr):
    """One program a row; a row without a finite number, or with NaN, becomes NaN."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    own_logits = logits_ptr + row * logits_stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(own_logits + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        largest = tl.maximum(largest, x.to(tl.float32))
    most = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(own_logits + start + lane, mask=start + lane < vocab_size, other=float("-inf"))
        sums += tl.exp(x.to(tl.float32) - most)
    log_sum = tl.log(tl.sum(sums, axis=0))
    for start in range(0, vocab_size, BLOCK):
        is_token = start + lane < vocab_size
        x = tl.load(own_logits + start + lane, mask=is_token, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * vocab_size + start + lane, (x - most) - log_sum, mask=is_token)


def log_softmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log_softmax_reference on the device of the logits, each row of which is contiguous.

    Allocates [R, V] float32 unless `out` is given, which must be contiguous.
    """
    require_triton(logits)
    check_tensors(logits.device, DTYPES, logits=logits)
    check_shape("logits", logits, None, None)
    R, V = logits.shape
    if out is None:
        out = torch.empty(R, V, dtype=torch.float32, device=logits.device)
    check_tensors(logits.device, (torch.float32,), out=out)
    check_shape("out", out, R, V)
    if not out.is_contiguous() or (R and logits.stride(1) != 1):
        raise ValueError(
            f"logits have strides {logits.stride()} and out {out.stride()}, rows of the first and "
            "all of the second must be contiguous; call contiguous() on them"
        )
    if R == 0 or V == 0:
        return out
    # Sums and differences are rounded one by one, in each version of Triton alike.
    log_softmax_kernel[(R,)](
        out, logits, logits.stride(0), V, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False
    )
    return out
