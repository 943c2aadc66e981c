from kernel_compiling import Case
from lmscope_kernels.log_softmax import NUM_WARPS, log_softmax_kernel

# What the launcher takes where nothing is interpreted.
BLOCK = 4096

CASES = [
    Case(
        kind,
        log_softmax_kernel,
        {
            "out_ptr": "*fp32",
            "logits_ptr": f"*{kind}",
            "logits_stride": "i32",
            "vocab_size": "i32",
        },
        {"BLOCK": BLOCK},
        {"num_warps": NUM_WARPS, "enable_fp_fusion": False},
    )
    for kind in ("bf16", "fp16", "fp32")
]
