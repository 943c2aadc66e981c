from kernel_compiling import MODELS, Case
from lmscope_kernels.block_attention_mass import NUM_BLOCKS, block_attention_mass_kernel

CASES = [
    Case(
        f"{name}-{window}",
        block_attention_mass_kernel,
        {
            **dict.fromkeys(("out_ptr", "block_lse_ptr", "lse_ptr"), "*fp32"),
            "seq_lens_ptr": "*i32",
            **dict.fromkeys(("out_stride", "block_lse_stride_r", "block_lse_stride_h"), "i32"),
        },
        {"H": shape[0], "S": 16, "NUM_BLOCKS": NUM_BLOCKS, "WINDOW": window},
        {"num_warps": 4, "enable_fp_fusion": True},
    )
    for name, shape in MODELS.items()
    for window in ((0, 4096) if name == "135M" else (0,))
]
