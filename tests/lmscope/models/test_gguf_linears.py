"""quantization="gguf": the matrices of the file as they are, with the tokens of float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lmscope import LLM, SamplingParams
from lmscope.models import linear
from lmscope.models.gguf_linears import GgufLinear
from lmscope.models.loader import load_model

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)
# Whole tiles in all matrices but the head, which has 258 rows.
SHAPE = {"num_key_value_heads": 4, "intermediate_size": 128}
BLOCKS = "*.blocks.safetensors"


def bodies(file):
    loaded = load_model(file, device="cpu", show_progress=False)
    return loaded, loaded.body(exact=False, quantization="gguf")


@needs_numba
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantise", ["Q4_0", "Q4_1", "Q8_0"])
def test_tokens_and_logprobs_are_those_of_float32(cache, tmp_path, write_gguf, kind, quantise):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, kind, quantise=quantise, **SHAPE)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    # Steps of one and of two rows; longer ones run in half precision.
    steps = {"max_num_batched_tokens": 2, "max_num_seqs": 2, "num_kv_blocks": 32}
    prompts = [[5, 9, 33, 41], [7] * 9, [11, 12]]

    def run(**options):
        with LLM(file, device="cpu", **steps, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return str(llm.plan), [output.outputs[0] for output in outputs]

    plan, found = run(quantization="gguf")
    _, expected = run(exact=True)

    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for our_place, their_place in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert our_place.keys() == their_place.keys()
            for token, logprob in our_place.items():
                # The head has no blocks, and is rounded to half precision.
                assert logprob.logprob == pytest.approx(their_place[token].logprob, abs=5e-3)
    # The embedding is the head, and no multiple of 64.
    assert "14 of 15 matrices as tiny.gguf has them" in plan


@needs_numba
def test_a_group_runs_as_one_matrix_and_one_that_has_no_blocks_as_without_them(
    cache, tmp_path, write_gguf
):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, quantise="Q4_1", **{**SHAPE, "num_key_value_heads": 2})

    loaded, body = bodies(file)

    layer = loaded.module.model.layers[0]
    groups = {
        name: body._packed.groups[tuple(id(each) for each in modules)]
        for name, modules in {
            "qkv": (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            "gate_up": (layer.mlp.gate_proj, layer.mlp.up_proj),
            "down": (layer.mlp.down_proj,),
        }.items()
    }
    # Two KV heads of 16 are half a tile.
    assert not isinstance(groups["qkv"], GgufLinear)
    assert isinstance(groups["gate_up"], GgufLinear)
    assert groups["gate_up"].blocks.shape == (256, 64)
    assert groups["down"].blocks.shape == (64, 128)
    # q is in blocks too, and not among those that the plan counts.
    assert "8 of 15 matrices" in body._packed.line(is_changed=False).why
    q = layer.self_attn.q_proj.weight
    method = body._packed._chosen.method
    assert method.packed_bytes(q) == method._method.packed_bytes(q)
    rows = torch.randn(2, 3, 64)
    with torch.inference_mode():
        for each in (rows, rows[:1, :2], rows[:0]):
            torch.testing.assert_close(
                groups["gate_up"](each)[..., :128], layer.mlp.gate_proj(each), atol=5e-3, rtol=1e-3
            )


@needs_numba
def test_the_blocks_are_written_once_and_read_again(cache, tmp_path, write_gguf):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, quantise="Q4_1", **SHAPE)
    loaded, _ = bodies(file)
    (stored,) = cache.rglob(BLOCKS)
    written = stored.stat().st_mtime_ns
    assert stored.stat().st_mode == (Path(loaded.path) / "config.json").stat().st_mode

    _, body = bodies(file)

    assert stored.stat().st_mtime_ns == written
    # Not in the folder: vLLM would take it for weights.
    assert stored.name.removesuffix(".blocks.safetensors") == Path(loaded.path).name
    assert stored.parent == Path(loaded.path).parent
    assert "gguf" in str(body._packed.line(is_changed=False))


def test_a_model_of_safetensors_has_no_blocks(tmp_path, cache, write_gguf):
    original = write_gguf(tmp_path / "tiny.gguf")
    original.save_pretrained(tmp_path / "folder")

    loaded = load_model(tmp_path / "folder", device="cpu", show_progress=False)

    assert loaded.gguf_file is None
    with pytest.raises(ValueError, match=r"loaded from safetensors.*int8|needs the extra cpu"):
        loaded.body(exact=False, quantization="gguf")


@needs_numba
@pytest.mark.parametrize(
    ("quantise", "is_gone", "reason"),
    [("", False, "no matrix of tiny.gguf"), ("Q4_1", True, "is gone")],
)
def test_a_file_without_blocks_or_none_at_all_says_so(
    cache, tmp_path, write_gguf, quantise, is_gone, reason
):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, quantise=quantise, **SHAPE)
    loaded = load_model(file, device="cpu", show_progress=False)
    if is_gone:
        file.unlink()

    with pytest.raises(ValueError, match=reason):
        loaded.body(exact=False, quantization="gguf")


def test_without_numba_it_says_what_to_install(cache, tmp_path, write_gguf, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, quantise="Q4_1", **SHAPE)
    loaded = load_model(file, device="cpu", show_progress=False)
    monkeypatch.setattr(linear, "why_not_numba", lambda: "numba is not installed; pip install x")

    with pytest.raises(ValueError, match=r"'gguf', which needs the extra cpu.*pip install"):
        loaded.body(exact=False, quantization="gguf")
