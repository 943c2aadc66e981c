from kernel_compiling import MODELS, Case
from lmscope_kernels.silu_mul import BLOCK, NUM_WARPS, silu_mul_kernel

CASES = [
    Case(
        name,
        silu_mul_kernel,
        {
            "out_ptr": "*bf16",
            "gate_up_ptr": "*bf16",
            "gate_up_stride": "i32:16",
            "out_stride": "i32:16",
        },
        {"SIZE": intermediate_size, "BLOCK": BLOCK},
        {"num_warps": NUM_WARPS, "enable_fp_fusion": True},
        ptx=(r"ld\.global[\w.:]*\.v4",),
    )
    for name, (_, _, _, _, intermediate_size, _) in MODELS.items()
]
