from kernel_compiling import Case
from lmscope_kernels.token_bitmask import BLOCK, token_bitmask_kernel

CASES = [
    Case(
        f"{logits[1:]}-{stride.removeprefix('i32') or 'odd'}",
        token_bitmask_kernel,
        {
            "logits_ptr": logits,
            "bitmask_ptr": "*i32",
            "rows_ptr": "*i32",
            **dict.fromkeys(("logits_stride", "vocab_size"), stride),
            "bitmask_stride": "i32",
        },
        {"BLOCK": BLOCK},
        {"num_warps": 4, "enable_fp_fusion": False},
    )
    for logits in ("*fp32", "*bf16")
    for stride in ("i32:16", "i32")
]
