"""Packing while a model is loaded: what is taken, what is not, and that it is the same."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from lmscope import LLM, SamplingParams
from lmscope.models import early_packing, linear
from lmscope.models.early_packing import EarlyPacking, begin_packing
from lmscope.models.fuse import lean_layout
from lmscope.models.linear import choose_linear_method
from lmscope.models.loader import load_model
from lmscope.models.packed import PackedLinears
from lmscope.models.plan import PlanLine
from lmscope.models.swap import linear_layers, weight_and_bias

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    linear._why_not_fp16(torch.float32, CPU) is not None or not early_packing._MAPS.exists(),
    reason="needs fbgemm on x86, and Linux",
)
TINY = {
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
SHAPES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, biases of some": ("Qwen2", {"num_attention_heads": 6, "head_dim": None}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {}),
    "mistral": ("Mistral", {}),
}


def save(folder, kind="Llama", change=None, **settings):
    """A model of random weights, biases included; `change` gets it before it is saved."""
    torch.manual_seed(0)
    given = {name: value for name, value in (TINY | settings).items() if value is not None}
    module = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**given))
    for parameter in module.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    if change is not None:
        with torch.no_grad():
            change(module)
    module.save_pretrained(folder)
    return folder


def fp16_packed(exact=False):
    return choose_linear_method(exact=exact, quantization=None, dtype=torch.float32, device=CPU)


@pytest.fixture
def begin():
    """`begin(folder)`, closed at the end."""
    begun = []

    def begin_one(folder, chosen=None):
        early = begin_packing(folder, chosen or fp16_packed())
        if early is not None:
            begun.append(early)
        return early

    yield begin_one
    for early in begun:
        early.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lmscope-packing")]


@pytest.fixture
def never_packs_late(monkeypatch):
    """What was not packed early cannot be had."""

    def take_all(self, parts):
        done = take(self, parts)
        assert done is not None
        return done

    take = EarlyPacking.take
    monkeypatch.setattr(EarlyPacking, "take", take_all)


@pytest.mark.parametrize(("kind", "settings"), SHAPES.values(), ids=SHAPES)
def test_all_of_a_model_is_packed_early_to_the_same_bits(kind, settings, tmp_path, begin):
    early = begin(save(tmp_path, kind, **settings))
    loaded = load_model(tmp_path, show_progress=False, early=early)
    assert not early._futures  # all that was packed was taken
    module = loaded.module
    packed = loaded._bodies.packed
    assert packed is not None

    groups = lean_layout(module).groups()
    wanted = PackedLinears(fp16_packed(), linear_layers(module), groups)

    assert packed.groups.keys() == wanted.groups.keys()
    assert packed.num_bytes == wanted.num_bytes > 0
    assert not packed.refused
    for ids, linear_of_group in packed.groups.items():
        width = next(
            weight_and_bias(layer).weight.shape[1]
            for layer in linear_layers(module).values()
            if id(layer) == ids[0]
        )
        rows = torch.randn(5, width)
        assert torch.equal(linear_of_group(rows), wanted.groups[ids](rows))
    assert loaded.body(exact=False)._packed is packed
    late = load_model(tmp_path, show_progress=False)
    memory = [str(each.body(exact=False).plan(PlanLine("1")).memory) for each in (loaded, late)]
    assert ["stay in their file" in line for line in memory] == [True, False]
    assert loaded.body(exact=True)._packed is not packed


def test_a_refused_weight_is_refused_early_for_the_same_reason(tmp_path, begin):
    def make_large(module):
        module.model.layers[1].mlp.up_proj.weight[3, 4] = 1e6
        module.model.layers[0].self_attn.o_proj.weight.fill_(1e-7)

    save(tmp_path, change=make_large)
    early = load_model(tmp_path, show_progress=False, early=begin(tmp_path))
    late = load_model(tmp_path, show_progress=False)

    got = early.body(exact=False)._packed
    wanted = late.body(exact=False)._packed
    assert early._bodies.packed is got
    assert not got.are_weights_unread  # F.linear reads them
    assert list(got.refused.values()) == list(wanted.refused.values())
    assert len(got.refused) == 3  # gate and up are one product
    assert str(got.line(False)) == str(wanted.line(False))


@pytest.mark.parametrize("trouble", ["written to", "copied", "made contiguous elsewhere"])
def test_a_parameter_that_is_not_what_the_file_holds_is_packed_itself(tmp_path, begin, trouble):
    early = begin(save(tmp_path))
    module = load_model(tmp_path, show_progress=False).module
    layer = module.model.layers[0].mlp.down_proj
    with torch.no_grad():
        if trouble == "written to":
            layer.weight[0, 0] = 5.0
        elif trouble == "copied":
            layer.weight = torch.nn.Parameter(layer.weight.clone() * 2, requires_grad=False)
        else:
            layer.weight.data = layer.weight.t().contiguous().t()

    assert early.take([weight_and_bias(layer)]) is None
    packed = PackedLinears(
        fp16_packed(), linear_layers(module), lean_layout(module).groups(), early
    )

    rows = torch.randn(3, 80)
    wanted = linear.Fp16PackedLinears().pack([weight_and_bias(layer)])(rows)
    assert torch.equal(packed.groups[id(layer),](rows), wanted)


def test_a_file_that_was_replaced_meanwhile_is_packed_from_the_module(tmp_path, begin):
    old, new = (
        save(tmp_path / "old"),
        save(tmp_path / "new", change=lambda m: m.lm_head.weight.mul_(3)),
    )
    early = begin(old)
    os.replace(new / "model.safetensors", old / "model.safetensors")

    loaded = load_model(old, show_progress=False, early=early)

    head = loaded.module.lm_head
    assert early.take([weight_and_bias(head)]) is None
    rows = torch.randn(3, 72)
    wanted = linear.Fp16PackedLinears().pack([weight_and_bias(head)])(rows)
    assert torch.equal(loaded._bodies.packed.groups[id(head),](rows), wanted)


def test_an_error_while_packing_early_is_met_again_or_not_at_all(tmp_path, begin, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(early_packing, "_read", fail)
    loaded = load_model(save(tmp_path), show_progress=False, early=begin(tmp_path))

    assert loaded.body(exact=False)._packed.num_bytes > 0


def test_what_cannot_be_packed_early_is_not_begun(tmp_path, begin):
    assert (
        begin(
            save(tmp_path / "module", "Phi3", head_dim=None, num_attention_heads=6, pad_token_id=0)
        )
        is None
    )
    assert begin(save(tmp_path / "half", change=lambda module: module.half())) is None
    assert begin(save(tmp_path / "exact"), fp16_packed(exact=True)) is None
    assert begin(tmp_path / "nothing") is None
    folder = save(tmp_path / "broken")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", whole[:4], whole[:100], b"\xff" * 64, b"\2" + bytes(7) + b"[]"):
        weights.write_bytes(content)
        assert begin(folder) is None
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"architectures": None}, {"num_hidden_layers": 3}, {"num_hidden_layers": "2"}):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert begin(folder) is None
    (folder / "config.json").write_text("[]")
    assert begin(folder) is None


def test_closing_at_once_ends_the_threads(tmp_path, begin):
    early = begin(save(tmp_path))
    early.close()
    early.close()

    module = load_model(tmp_path, show_progress=False).module
    assert early.take([weight_and_bias(module.lm_head)]) is None


def test_an_engine_packs_early_and_leaves_the_weights_in_the_file(tmp_path, never_packs_late):
    save(tmp_path, vocab_size=4096, hidden_size=288, intermediate_size=1024, num_hidden_layers=4)
    num_threads = torch.get_num_threads()

    with LLM(tmp_path, num_kv_blocks=8, threads=1) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
        assert "fp16-packed" in str(llm.plan.linears)
        file = tmp_path / "model.safetensors"
        assert resident_bytes(file) < file.stat().st_size / 4
        # Somebody who looks at the weights finds them.
        assert sum(float(p.abs().sum()) for p in llm.module.parameters()) > 0
        assert resident_bytes(file) > file.stat().st_size / 2
    assert torch.get_num_threads() == num_threads


def test_what_is_written_to_weights_that_lay_in_the_file_takes_effect(tmp_path, never_packs_late):
    with LLM(save(tmp_path), num_kv_blocks=8, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert "stay in their file" in str(llm.plan.memory)

        llm.module.get_output_embeddings().weight.data.neg_()
        llm.generate([[1, 2, 3]], params, use_tqdm=False)

        assert "changed" in llm.plan.body.why


@pytest.mark.parametrize(
    "options", [{"exact": True}, {"batch_invariant": True}, {"dtype": "bfloat16"}]
)
def test_an_engine_with_other_weights_begins_nothing(tmp_path, monkeypatch, options):
    monkeypatch.setattr(early_packing, "begin_packing", lambda *_: pytest.fail("it was begun"))
    with LLM(save(tmp_path), num_kv_blocks=8, threads=1, **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)


def resident_bytes(file):
    """Of the file, in this process's memory through its mappings."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split(maxsplit=5)
        if "-" in key:
            is_of_file = bool(rest) and rest[-1].strip() == os.path.realpath(file)
        elif key == "Rss:" and is_of_file:
            total += 1024 * int(rest[0])
    return total
