import torch
from kernel_compiling import CAPABILITIES, MODELS, Case
from lmscope_kernels.triton_support import attention_tile
from lmscope_kernels.unified_attention import paged_attention_constants, paged_attention_kernel

STRIDES = [
    *("query_token_stride", "query_head_stride", "out_token_stride", "out_head_stride"),
    *("key_block_stride", "key_place_stride", "key_head_stride"),
    *("value_block_stride", "value_place_stride", "value_head_stride"),
]
# The largest heads that are let through, as of Gemma.
SHAPES = {name: shape[:3] for name, shape in MODELS.items()} | {"D256": (8, 4, 256)}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# Compiling attention for sm_100 takes as long as for both of these, so it is for the shapes alone.
OF_THE_RULES = [each for each in CAPABILITIES if each < 100]


def attention_case(model, capability, *, dtype=torch.bfloat16, has_many_rows, **options):
    H, K, D = SHAPES[model]
    tile = attention_tile(dtype, D, (capability // 10, capability % 10), has_many_rows)
    settings = {"window": None, "has_softcap": False, "has_lse": True, "fixed_tile": False}
    settings |= options
    name = "-".join([model, NAMES[dtype], "prefill" if has_many_rows else "decode", *options])
    pointer = f"*{NAMES[dtype]}"
    return Case(
        name,
        paged_attention_kernel,
        {
            **dict.fromkeys(["out_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"], pointer),
            "lse_ptr": "*fp32",
            **dict.fromkeys(["block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr"], "*i32"),
            **dict.fromkeys(["num_requests", "num_rows", "block_table_stride"], "i32"),
            **dict.fromkeys(["scale", "inner_scale"], "fp32"),
            **dict.fromkeys(STRIDES, "i32:16"),
        },
        paged_attention_constants(H, K, D, 16, tile, **settings),
        {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": True,
        },
        ptx=(r"cp\.async\.c[ga]\.shared\.global.*, 0x10\b|cp\.async\.c[ga]\.shared\.global.*, 16",),
        ptx_sm_90=(r"wgmma\.mma_async",) if tile.num_rows >= 64 else (),
        capabilities=(capability,),
    )


CASES = (
    [
        attention_case(model, capability, **settings)
        for capability in CAPABILITIES
        for model in MODELS
        for settings in ({"has_many_rows": False}, {"has_many_rows": True})
    ]
    + [
        attention_case("Qwen3-0.6B", capability, has_many_rows=has_many_rows, **settings)
        for capability in OF_THE_RULES
        for has_many_rows, settings in (
            (True, {"window": 4096, "has_softcap": True}),
            (False, {"window": 4096, "has_softcap": True}),
            (True, {"dtype": torch.float16}),
            (True, {"dtype": torch.float32}),
        )
    ]
    + [
        attention_case("D256", capability, has_many_rows=True, **settings)
        for capability in OF_THE_RULES
        for settings in ({}, {"window": 4096, "has_softcap": True}, {"fixed_tile": True})
    ]
    + [
        # Of a batch-invariant engine, where decoding rows take this one too.
        attention_case(
            model, capability, has_many_rows=True, has_lse=False, fixed_tile=True, dtype=dtype
        )
        for capability in OF_THE_RULES
        for model in MODELS
        for dtype in (NAMES if model == "Qwen3-0.6B" else (torch.bfloat16,))
    ]
)
