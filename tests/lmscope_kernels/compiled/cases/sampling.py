from kernel_compiling import MODELS, Case
from lmscope_kernels.sampling import draw_kernel, pick_kernel
from lmscope_kernels.sampling_search import narrow_kernel, row_maximum_kernel
from triton import next_power_of_2

# What the launcher takes where nothing is interpreted; the chunks of each vocabulary, most first.
CHUNK, STRIP = 2048, 256
CHUNKS, *OTHER_CHUNKS = sorted(
    {next_power_of_2(-(-shape[-1] // CHUNK)) for shape in MODELS.values()}, reverse=True
)
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def types(logits, stride):
    return {
        "logits_ptr": logits,
        **dict.fromkeys(
            ("temperature_ptr", "top_p_ptr", "maxima_ptr", "sums_ptr", "best_ptr", "score_ptr"),
            "*fp32",
        ),
        "min_p_ptr": "*fp64",
        **dict.fromkeys(("top_k_ptr", "state_ptr", "best_id_ptr"), "*i32"),
        **dict.fromkeys(("seed_ptr", "position_ptr", "tokens_ptr"), "*i64"),
        **dict.fromkeys(("logits_stride", "vocab_size"), stride),
        **dict.fromkeys(("num_chunks", "num_rows", "level", "sums_stride", "state_stride"), "i32"),
    }


def cases(name, logits, stride):
    own = types(logits, stride)
    chunks = {"CHUNK": CHUNK, "CHUNKS": CHUNKS}
    filters = {"HAS_TOP_K": True, "HAS_MIN_P": True}
    none = {"HAS_TOP_K": False, "HAS_MIN_P": False, "HAS_TOP_P": False}
    absent = dict.fromkeys(("top_k_ptr", "top_p_ptr", "min_p_ptr"))
    return [
        Case(f"maximum-{name}", row_maximum_kernel, own, {"CHUNK": CHUNK}, OPTIONS),
        *(
            Case(
                f"narrow-by-{'mass' if by_mass else 'count'}-{name}",
                narrow_kernel,
                own,
                {**chunks, **filters, "BY_MASS": by_mass, "STRIP": STRIP},
                OPTIONS,
            )
            for by_mass in (False, True)
        ),
        Case(f"draw-{name}", draw_kernel, own, {**chunks, **filters, "HAS_TOP_P": True}, OPTIONS),
        Case(f"draw-unfiltered-{name}", draw_kernel, own, {**chunks, **none, **absent}, OPTIONS),
    ]


def smaller_cases(chunks):
    own = types("*fp32", "i32:16")
    constants = {"CHUNK": CHUNK, "CHUNKS": chunks, "HAS_TOP_K": True, "HAS_MIN_P": True}
    by_mass = {**constants, "BY_MASS": True, "STRIP": STRIP}
    return [
        Case(f"narrow-by-mass-{chunks}", narrow_kernel, own, by_mass, OPTIONS),
        Case(f"draw-{chunks}", draw_kernel, own, {**constants, "HAS_TOP_P": True}, OPTIONS),
        Case(f"pick-{chunks}", pick_kernel, own, {"CHUNKS": chunks}, OPTIONS),
    ]


CASES = [
    *cases("f32", "*fp32", "i32:16"),
    *(case for chunks in OTHER_CHUNKS for case in smaller_cases(chunks)),
    *cases("bf16-odd", "*bf16", "i32"),
    Case("pick", pick_kernel, types("*fp32", "i32"), {"CHUNKS": CHUNKS}, OPTIONS),
]
