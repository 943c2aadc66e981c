from kernel_compiling import MODELS, Case
from lmscope_kernels.rms_norm import rms_norm_kernel, rms_norm_warps
from triton import next_power_of_2

TYPES = {
    "out_ptr": "*bf16",
    "x_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "x_stride": "i32:16",
    "residual_stride": "i32:16",
    "out_stride": "i32:16",
    "eps": "fp32",
}

CASES = [
    Case(
        f"{name}-{'residual' if has_residual else 'plain'}",
        rms_norm_kernel,
        TYPES,
        {
            "SIZE": hidden_size,
            "BLOCK": next_power_of_2(hidden_size),
            "HAS_RESIDUAL": has_residual,
            **({} if has_residual else {"residual_ptr": None}),
        },
        {"num_warps": rms_norm_warps(next_power_of_2(hidden_size)), "enable_fp_fusion": True},
        ptx=(r"ld\.global[\w.:]*\.v4",) if hidden_size == next_power_of_2(hidden_size) else (),
    )
    for name, (_, _, _, hidden_size, _, _) in MODELS.items()
    for has_residual in (False, True)
]
