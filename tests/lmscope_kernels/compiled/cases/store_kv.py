from kernel_compiling import MODELS, Case
from lmscope_kernels.store_kv import store_kv_kernel, store_kv_warps
from triton import next_power_of_2

TYPES = {
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "key_cache_ptr": "*bf16",
    "value_cache_ptr": "*bf16",
    "slot_mapping_ptr": "*i64",
    "key_norm_ptr": "*fp32",
    "key_token_stride": "i32:16",
    "key_head_stride": "i32:16",
    "value_token_stride": "i32:16",
    "value_head_stride": "i32:16",
    "key_block_stride": "i32:16",
    "key_place_stride": "i32:16",
    "key_cache_head_stride": "i32:16",
    "value_block_stride": "i32:16",
    "value_place_stride": "i32:16",
    "value_cache_head_stride": "i32:16",
}

CASES = [
    Case(
        f"{name}-{'norm' if has_key_norm else 'plain'}",
        store_kv_kernel,
        TYPES,
        {
            "K": num_kv_heads,
            "D": head_size,
            "S": 16,
            "BLOCK_K": next_power_of_2(num_kv_heads),
            "BLOCK_D": next_power_of_2(head_size),
            "HAS_KEY_NORM": has_key_norm,
            **({} if has_key_norm else {"key_norm_ptr": None}),
        },
        {
            "num_warps": store_kv_warps(next_power_of_2(num_kv_heads) * next_power_of_2(head_size)),
            "enable_fp_fusion": True,
        },
        ptx=(r"ld\.global[\w.:]*\.v4", r"st\.global[\w.:]*\.v4"),
    )
    for name, (_, num_kv_heads, head_size, _, _, _) in MODELS.items()
    for has_key_norm in (False, True)
]
