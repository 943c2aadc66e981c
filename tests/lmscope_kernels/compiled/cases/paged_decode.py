import torch
from kernel_compiling import CAPABILITIES, MODELS, Case
from lmscope_kernels.paged_decode import decode_tile, merge_kernel, split_kernel
from triton import next_power_of_2

OTHER_SHAPES = {"D80": (4, 2, 80), "D96": (4, 4, 96), "D256": (8, 4, 256)}
SHAPES = {name: shape[:3] for name, shape in MODELS.items()} | OTHER_SHAPES
TYPE_NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
STRIDES = [
    "query_stride_r",
    "query_stride_h",
    *(f"{cache}_stride_{dim}" for cache in ("key", "value") for dim in "bsk"),
]


def split_case(name, dtype, capability, *, has_block_lse=False, window=0, has_softcap=False):
    num_heads, num_kv_heads, head_size = SHAPES[name]
    num_keys, num_warps, num_stages = decode_tile(dtype, head_size, 16, divmod(capability, 10))
    num_groups = num_heads // num_kv_heads
    kind = TYPE_NAMES[dtype]
    return Case(
        f"split-{name}-{kind[1:]}-{'watched' if has_block_lse else 'plain'}-{window}-{has_softcap}",
        split_kernel,
        {
            **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), kind),
            **dict.fromkeys(("partial_output_ptr", "partial_lse_ptr", "block_lse_ptr"), "*fp32"),
            **dict.fromkeys(("block_table_ptr", "seq_lens_ptr"), "*i32"),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
            **dict.fromkeys(STRIDES, "i32:16"),
            **dict.fromkeys(
                ("num_splits", "table_stride", "block_lse_stride_r", "block_lse_stride_h"), "i32"
            ),
        },
        {
            "G": num_groups,
            "D": head_size,
            "D_PADDED": next_power_of_2(head_size),
            "S": 16,
            "NUM_ROWS": max(16, next_power_of_2(num_groups)),
            "NUM_KEYS": num_keys,
            "SPLIT": 256,
            "WINDOW": window,
            "HAS_SOFTCAP": has_softcap,
            "HAS_BLOCK_LSE": has_block_lse,
            **({} if has_block_lse else {"block_lse_ptr": None}),
        },
        {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
        ptx=(r"cp\.async\.c[ga]", r"ld\.global[\w.:]*\.v4|cp\.async\.c[ga]\.\w+.*0x10"),
        capabilities=(capability,),
    )


def merge_case(name):
    head_size = SHAPES[name][2]
    return Case(
        f"merge-{name}",
        merge_kernel,
        {
            "out_ptr": "*bf16",
            **dict.fromkeys(("lse_ptr", "partial_output_ptr", "partial_lse_ptr"), "*fp32"),
            "seq_lens_ptr": "*i32",
            "num_splits": "i32",
            **dict.fromkeys(("out_stride_r", "out_stride_h"), "i32:16"),
        },
        {
            "D": head_size,
            "D_PADDED": next_power_of_2(head_size),
            "SPLIT": 256,
            "WINDOW": 0,
        },
        {"num_warps": 1, "enable_fp_fusion": True},
    )


CASES = [
    case
    for capability in CAPABILITIES
    for case in [
        *(
            split_case(name, torch.bfloat16, capability, has_block_lse=name in MODELS)
            for name in SHAPES
        ),
        split_case("135M", torch.float32, capability, has_block_lse=True),
        split_case("D256", torch.float32, capability),
        split_case("Qwen3-0.6B", torch.bfloat16, capability),
        split_case("Qwen3-0.6B", torch.float32, capability, has_block_lse=True),
        split_case("Qwen3-0.6B", torch.float16, capability, window=4096, has_softcap=True),
    ]
] + [merge_case(name) for name in ("135M", "Qwen3-0.6B", "D80")]
