import torch
from kernel_compiling import MODELS, Case
from lmscope_kernels.batch_invariant_matmul import batch_invariant_matmul_kernel, matmul_tile


def case(name, size, dtype, kind):
    tile = matmul_tile(dtype)
    return Case(
        f"{name}-{kind}",
        batch_invariant_matmul_kernel,
        {
            **dict.fromkeys(("out_ptr", "rows_ptr", "weight_ptr"), f"*{kind}"),
            **dict.fromkeys(("num_rows", "num_outputs"), "i32"),
            **dict.fromkeys(("rows_stride", "weight_stride", "out_stride"), "i32:16"),
        },
        {
            "SIZE": size,
            "NUM_ROWS": tile.num_rows,
            "NUM_OUTPUTS": tile.num_outputs,
            "NUM_INNER": tile.num_inner,
        },
        {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": True,
        },
        ptx=(r"cp\.async\.c[ga]",),
    )


CASES = [
    case(name, intermediate_size, dtype, kind)
    for name, (_, _, _, _, intermediate_size, _) in MODELS.items()
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"))
]
