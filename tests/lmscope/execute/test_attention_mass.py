"""How much attention each block receives, against the weights that transformers returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput

PROMPT_A = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11]
PROMPT_B = [*PROMPT_A[:17], 60, 61, 62, 63]


def reference_mass(reference, tokens, block_size) -> np.ndarray:
    """[layers, H, blocks]: what the last of `tokens` attends to, from eager attention."""
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = reference(torch.tensor([tokens]), output_attentions=True).attentions
    weights = torch.stack([layer[0, :, -1] for layer in attentions])
    blocks = [block.sum(dim=-1) for block in weights.split(block_size, dim=-1)]
    return torch.stack(blocks, dim=-1).numpy()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_mass_is_what_transformers_attends_to(tiny_model, driver, kind, block_size):
    loaded, reference = tiny_model(kind)
    run = driver(loaded, block_size)
    run.runner.measure_attention(1, 1)
    run.add("a", PROMPT_A)
    run.step({"a": 6})  # a chunk: its last token is the newest
    outputs = [(run.outputs[-1], {"a": PROMPT_A[:6]}, run.runner.attention_by_head)]
    run.step(["a"])
    run.add("b", PROMPT_B, shares="a", num_shared_blocks=16 // block_size)
    known = {"a": list(run.tokens["a"]), "b": PROMPT_B}
    outputs.append((run.step(["b", "a"]), known, run.runner.attention_by_head))

    for output, tokens, by_head in outputs:
        assert set(output.attention_mass) == set(by_head) == set(tokens)
        for request_id, ids in tokens.items():
            expected = reference_mass(reference, ids, block_size)
            np.testing.assert_allclose(by_head[request_id], expected, atol=2e-5)
            shares = output.attention_mass[request_id]
            np.testing.assert_allclose(shares, expected.mean(axis=(0, 1)), atol=2e-5)
            assert sum(shares) == pytest.approx(1, abs=1e-4)


def test_measuring_changes_no_logit(tiny_model, driver):
    loaded, _ = tiny_model("llama")
    plain, measured = driver(loaded), driver(loaded)
    measured.runner.measure_attention(1, 0)
    for run in (plain, measured):
        run.add("a", PROMPT_A)
        for _ in range(3):
            run.step(["a"])

    assert plain.outputs[-1].attention_mass == {}
    assert measured.outputs[-1].attention_mass["a"]
    for position, logits in plain.logits["a"].items():
        assert torch.equal(logits, measured.logits["a"][position])


def test_an_engine_measures_while_somebody_asks(tiny_model):
    loaded, _ = tiny_model("llama")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = []
    with LLM(loaded.path, block_size=4, num_kv_blocks=40) as llm:
        llm.tap.on(ModelRunnerOutput, outputs.append)
        prompt = {"prompt_token_ids": PROMPT_A}
        llm.generate(prompt, params, use_tqdm=False)
        assert all(output.attention_mass == {} for output in outputs)
        outputs.clear()
        with llm.measure_attention() as first, llm.measure_attention(by_head=True) as second:
            first.close()
            first.close()
            llm.generate(prompt, params, use_tqdm=False)
            (heads,) = second.by_head().values()
            with pytest.raises(ValueError, match="by_head is False"):
                first.by_head()
        assert heads.shape == (loaded.num_layers, loaded.num_query_heads, 6)
        assert [len(next(iter(o.attention_mass.values()))) for o in outputs if o.req_ids] == [
            5,
            5,
            6,
        ]
        outputs.clear()
        llm.generate(prompt, params, use_tqdm=False)
        assert all(output.attention_mass == {} for output in outputs)
        with pytest.raises(ValueError, match="closed"):
            second.by_head()
        left_open = llm.measure_attention()
    left_open.close()  # of an engine that is gone


def test_a_script_has_no_attention():
    with (
        LLM("scripted", execute="scripted", script=lambda request, position: 7) as llm,
        pytest.raises(ValueError, match="no attention"),
    ):
        llm.measure_attention()
