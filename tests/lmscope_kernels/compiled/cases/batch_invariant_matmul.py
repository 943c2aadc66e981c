import torch
from kernel_compiling import MODELS, Case
from lmscope_kernels.batch_invariant_matmul import batch_invariant_matmul_kernel, matmul_tile

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def case(size, dtype, has_bias=False):
    kind, tile = KINDS[dtype], matmul_tile(dtype)
    return Case(
        f"{size}-{kind}{'-bias' if has_bias else ''}",
        batch_invariant_matmul_kernel,
        {
            **dict.fromkeys(("out_ptr", "rows_ptr", "weight_ptr", "bias_ptr"), f"*{kind}"),
            **dict.fromkeys(("num_rows", "num_outputs"), "i32"),
            **dict.fromkeys(("rows_stride", "weight_stride", "out_stride"), "i32:16"),
        },
        {
            "SIZE": size,
            "NUM_ROWS": tile.num_rows,
            "NUM_OUTPUTS": tile.num_outputs,
            "NUM_INNER": tile.num_inner,
            "HAS_BIAS": has_bias,
            **({} if has_bias else {"bias_ptr": None}),
        },
        {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": True,
        },
        ptx=(r"cp\.async\.c[ga]",),
        # Each row tile holds the 64 rows that one instruction of sm_90 takes.
        ptx_sm_90=() if dtype == torch.float32 else ("wgmma",),
    )


# What is multiplied is as long as the hidden size, all query heads, or the intermediate size.
SIZES = sorted(
    {
        size
        for num_heads, _, head_size, hidden_size, intermediate_size, _ in MODELS.values()
        for size in (hidden_size, num_heads * head_size, intermediate_size)
    }
)
CASES = [
    *(case(size, torch.bfloat16) for size in SIZES),
    *(case(size, dtype) for dtype in (torch.float16, torch.float32) for size in SIZES[::3]),
    *(case(SIZES[-1], dtype, has_bias=True) for dtype in KINDS),
]
