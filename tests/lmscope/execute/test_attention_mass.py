"""How much attention each block receives, against the weights that transformers returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput
from lmscope.execute import model_runner
from lmscope.models import attention_mass
from lmscope.models.attention_mass import AttentionMass, shares_of

PROMPT_A = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11]
PROMPT_B = [*PROMPT_A[:17], 60, 61, 62, 63]


class Clock:
    """Says the time that a test sets, and goes on by itself with each look at it."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


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
    run = driver(loaded, block_size, clock=Clock(tick_s=1.0))
    run.runner.measure_attention(1, 1)
    run.add("a", PROMPT_A)
    run.step({"a": 6})  # a chunk: its last token is the newest
    outputs = [(run.outputs[-1], {"a": PROMPT_A[:6]}, run.runner.attention_by_head.shares)]
    run.step(["a"])
    run.add("b", PROMPT_B, shares="a", num_shared_blocks=16 // block_size)
    known = {"a": list(run.tokens["a"]), "b": PROMPT_B}
    outputs.append((run.step(["b", "a"]), known, run.runner.attention_by_head.shares))

    for output, tokens, by_head in outputs:
        assert set(output.attention_mass) == set(by_head) == set(tokens)
        for request_id, ids in tokens.items():
            expected = reference_mass(reference, ids, block_size)
            np.testing.assert_allclose(by_head[request_id], expected, atol=2e-5)
            shares = output.attention_mass[request_id]
            np.testing.assert_allclose(shares, expected.mean(axis=(0, 1)), atol=2e-5)
            assert sum(shares) == pytest.approx(1, abs=1e-4)


def test_shares_have_six_digits_and_as_many_blocks_as_the_request():
    mean = np.random.default_rng(3).dirichlet(np.ones(7), 4).astype(np.float32)

    shares = shares_of(mean, np.array([7, 1, 0, 4], dtype=np.int32))

    assert [len(each) for each in shares] == [7, 1, 0, 4]
    for row, own in zip(mean.tolist(), shares, strict=True):
        assert own == tuple(round(share, 6) for share in row[: len(own)])


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


def test_by_head_is_kept_five_times_a_second_and_the_mean_in_every_step(tiny_model, driver):
    loaded, _ = tiny_model("llama")
    clock = Clock()
    run = driver(loaded, clock=clock)
    run.add("a", PROMPT_A)
    run.step(["a"])
    run.runner.measure_attention(1, 1)
    kept = []
    for _ in range(30):
        run.step(["a"])
        assert run.outputs[-1].attention_mass["a"], "the mean"
        kept.append(run.runner.attention_by_head.step)
        num_blocks = {array.shape[2] for array in run.runner.attention_by_head.shares.values()}
        assert num_blocks == {-(-(18 + kept[-1]) // 4)}, "as long as the table was in that step"
        clock.now += 0.0625

    steps = sorted(set(kept))
    # Of steps a sixteenth of a second apart every fourth one; the first of them at once.
    assert steps == list(range(2, 31, 4))
    run.runner.measure_attention(-1, -1)
    run.step(["a"])
    assert run.runner.attention_by_head == (0, {})


def test_who_measures_by_head_in_turns_gets_no_more(tiny_model, driver):
    loaded, _ = tiny_model("llama")
    clock = Clock()
    run = driver(loaded, clock=clock)
    run.add("a", PROMPT_A)
    for _ in range(8):
        run.runner.measure_attention(1, 1)
        run.step(["a"])
        is_kept = run.runner.attention_by_head.step > 0
        assert is_kept == (clock.now % 0.25 == 0)
        run.runner.measure_attention(-1, -1)
        clock.now += 0.125


def test_an_engine_measures_while_somebody_asks(tiny_model, monkeypatch):
    monkeypatch.setattr(model_runner, "BY_HEAD_INTERVAL_S", 0.0)
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
            assert second.step == 0
            (heads,) = second.by_head().values()
            assert second.step == max(output.step for output in outputs if output.req_ids)
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


def test_a_long_request_does_not_make_the_keys_of_all_others_as_long(monkeypatch):
    """Else 256 requests beside one of 32,768 tokens would take 34 GB of a GPU."""
    monkeypatch.setattr(attention_mass, "_MOST_KEY_BYTES", 40 * 2 * 8 * 4)  # of 40 tokens
    seq_lens = np.array([3, 9, 1, 100, 4, 4, 30, 2], dtype=np.int32)
    num_blocks = -(-seq_lens // 4)
    table = np.zeros((8, 25), dtype=np.int32)
    block_ids = iter(range(1, 100))
    for row, count in enumerate(num_blocks):
        table[row, :count] = [next(block_ids) for _ in range(count)]
    torch.manual_seed(3)
    key_cache, query = torch.randn(100, 4, 2, 8), torch.randn(8, 4, 8)
    gathered = []

    def shares(seq_lens: np.ndarray, rows: slice, window: int | None) -> list[tuple[float, ...]]:
        mass = AttentionMass(
            query_start_loc=np.arange(len(seq_lens) + 1, dtype=np.int32),
            seq_lens=seq_lens,
            block_table=table[rows],
            block_size=4,
            device=torch.device("cpu"),
            keeps_heads=True,
        )
        mass_of = mass._mass_of
        monkeypatch.setattr(
            mass, "_mass_of", lambda *a: gathered.append(len(a[0]) * a[2] * 4) or mass_of(*a)
        )
        mass.add(query[rows], key_cache, 0.3, window, None)
        assert [each.shape[2] for each in mass.by_head()] == (-(-seq_lens // 4)).tolist()
        return mass.shares()

    for window in (None, 7):
        gathered.clear()
        together = shares(seq_lens, slice(None), window)
        assert gathered == [36, 100, 8, 32, 4]
        for row in range(8):
            (alone,) = shares(seq_lens[row : row + 1], slice(row, row + 1), window)
            assert together[row] == pytest.approx(alone, abs=2e-6)
