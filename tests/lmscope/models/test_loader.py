"""load_model: what loads, what is known of it, and what every wrong folder is told."""

from __future__ import annotations

import json
import logging
import platform
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
)

from lmscope.models.attention import ATTENTION_NAME
from lmscope.models.loader import load_model

SETTINGS = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(folder, config=None, *, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = config or LlamaConfig(**{**SETTINGS, **changes})
    module = AutoModelForCausalLM.from_config(config).to(dtype)
    module.save_pretrained(folder)
    return module


def load(folder, **options):
    return load_model(folder, show_progress=False, **options)


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_knows_what_an_engine_needs(folder):
    loaded = load(folder)

    assert loaded.path == str(folder)
    assert (loaded.vocab_size, loaded.max_model_len) == (97, 128)
    assert (loaded.num_layers, loaded.num_query_heads, loaded.num_kv_heads) == (2, 6, 2)
    assert loaded.head_size == 16  # and not 48 / 6
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.kv_block_bytes(16) == 2 * 2 * 16 * 2 * 16 * 4
    assert loaded.parameter_bytes == sum(
        tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()
    )


def test_the_module_is_ready_to_run_with_our_attention(folder):
    module = load(folder).module

    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert module.config._attn_implementation == ATTENTION_NAME
    assert AutoModelForCausalLM.from_pretrained(folder).config._attn_implementation == "sdpa"


def test_knows_how_its_layers_attend(folder):
    loaded = load(folder)

    assert (loaded.windows, loaded.is_softcapped) == ((None,), False)


def test_shared_weights_are_counted_once(tmp_path):
    save_model(tmp_path, tie_word_embeddings=True)
    untied = tmp_path / "untied"
    save_model(untied, tie_word_embeddings=False)

    assert load(untied).parameter_bytes - load(tmp_path).parameter_bytes == 97 * 48 * 4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_is_float32_on_a_cpu(tmp_path, stored):
    original = save_model(tmp_path, dtype=stored)

    loaded = load(tmp_path)

    assert loaded.dtype == torch.float32
    for name, tensor in loaded.module.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name].float()), name


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_type_that_is_asked_for_is_used(folder, dtype):
    loaded = load(folder, dtype=dtype)

    assert loaded.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.kv_block_bytes(16) == 2 * 2 * 16 * 2 * 16 * 2


@pytest.mark.parametrize("ids", [7, [7, 9], None])
def test_every_end_of_a_text_in_the_generation_config_is_known(folder, ids):
    GenerationConfig(eos_token_id=ids).save_pretrained(folder)

    loaded = load(folder)

    assert loaded.eos_token_ids == {7: (7,), None: (2,)}.get(ids if ids != [7, 9] else 0, (7, 9))
    assert loaded.eos_token_id == loaded.eos_token_ids[0]  # no tokenizer that knows better


class EndTokenizer:
    eos_token_id = 42


def test_a_given_tokenizer_is_taken_as_it_is_and_names_the_end(folder):
    tokenizer = EndTokenizer()

    loaded = load(folder, tokenizer=tokenizer)

    assert loaded.tokenizer is tokenizer
    assert loaded.eos_token_id == 42
    assert loaded.eos_token_ids == (2,)


def test_a_folder_without_a_tokenizer_loads_and_warns(folder, caplog):
    with caplog.at_level(logging.WARNING, logger="lmscope"):
        loaded = load(folder, load_tokenizer=pytest.fail)

    assert loaded.tokenizer is None
    assert "has no tokenizer, so prompts must be token ids" in caplog.text


def test_a_dtype_that_is_slow_on_a_cpu_is_said_once(folder, caplog, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    loaded = load(folder, dtype="bfloat16")
    with caplog.at_level(logging.WARNING, logger="lmscope"):
        for _ in range(2):
            loaded.body(exact=False)
        loaded.body(exact=True)

    (message,) = [r.getMessage() for r in caplog.records if "F.linear" in r.getMessage()]
    assert "these are bfloat16; use dtype='float32'" in message


def test_no_tokenizer_is_loaded_unless_there_is_something_to_load_it_with(folder, caplog):
    (folder / "tokenizer.json").write_text("{}")

    assert load(folder).tokenizer is None
    assert "tokenizer" not in caplog.text


def test_the_tokenizer_is_what_was_made_of_the_folder(folder):
    (folder / "tokenizer.json").write_text("{}")

    loaded = load(folder, load_tokenizer=lambda place: ("made of", place))

    assert loaded.tokenizer == ("made of", str(folder))


def test_a_tokenizer_may_come_from_another_folder(folder, demo_model):
    loaded = load(folder, tokenizer=demo_model, load_tokenizer=AutoTokenizer.from_pretrained)

    assert loaded.tokenizer.encode("123") == [33, 34, 35]
    assert loaded.eos_token_id == 2


def test_a_model_in_parts_loads(tmp_path):
    module = save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2

    loaded = load(tmp_path).module

    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_gguf_file_loads_and_is_converted_once(tmp_path, cache, write_gguf, monkeypatch):
    file = tmp_path / "tiny.gguf"
    original = write_gguf(file, "qwen3")

    loaded = load(file, load_tokenizer=AutoTokenizer.from_pretrained)

    assert loaded.path.startswith(str(cache / "gguf" / "tiny-"))
    assert loaded.tokenizer.eos_token_id == loaded.eos_token_id == 257
    assert torch.equal(loaded.module.lm_head.weight, original.lm_head.weight)
    with monkeypatch.context() as patch:
        patch.setattr("lmscope.models.gguf_file.convert_gguf", pytest.fail)
        assert load(file).path == loaded.path
    write_gguf(file, "qwen3", num_hidden_layers=1)
    assert load(file).num_layers == 1


def test_the_demo_model_loads_by_its_name(demo_model):
    loaded = load("demo")

    assert loaded.path == str(demo_model)
    assert (loaded.num_layers, loaded.num_query_heads, loaded.num_kv_heads) == (30, 9, 3)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (8192, 49152, (2,))
    assert loaded.parameter_bytes == 538_060_032


# -- what cannot be loaded -----------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'; give a folder with"):
        load(str(tmp_path / "nowhere"))


def test_a_missing_gguf_file(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file '.*no\.gguf'"):
        load(tmp_path / "no.gguf")


def test_a_weight_of_another_shape_is_refused(folder):
    edit_config(folder, vocab_size=96)

    with pytest.raises(
        ValueError, match=r"of another shape lm_head\.weight \(97, 48\) for \(96, 48\)"
    ):
        load(folder)


def test_a_config_that_contradicts_itself(folder):
    edit_config(folder, num_attention_heads=7)

    with pytest.raises(ValueError, match=r"the config of .* \(Class validation .* heads \(7\)"):
        load(folder)


def test_a_file_that_was_cut_short_is_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(ValueError, match="cannot be loaded as a language model of type 'llama'"):
        load(folder)


def test_a_config_without_a_greatest_length_is_refused(tmp_path, monkeypatch):
    save_model(tmp_path)
    monkeypatch.setattr("lmscope.models.loader._LENGTH_NAMES", ("n_positions",))

    with pytest.raises(ValueError, match="states no greatest length"):
        load(tmp_path)


def test_a_tokenizer_that_cannot_be_read(folder):
    (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(ValueError, match=r"the tokenizer of '.*' cannot be loaded .* tokenizer="):
        load(folder, load_tokenizer=AutoTokenizer.from_pretrained)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float23"}, "dtype is 'float23'; did you mean float32"),
        ({"dtype": torch.int8}, "dtype is torch.int8; it takes 'auto'"),
        ({"device": "gpu"}, "device is 'gpu'; it takes 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_wrong_options(folder, options, message):
    with pytest.raises(ValueError, match=message):
        load(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(folder):
    with pytest.raises(ValueError, match=r"torch finds no CUDA device: .*or use device='cpu'"):
        load(folder, device="cuda")


def test_weights_without_room_on_a_gpu_are_told_how_much_there_is(folder, monkeypatch):
    def refuse(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 80 * 10**9))

    with pytest.raises(ValueError, match=r"0\.00 GB, and of 80\.00 GB on cpu 3\.00 GB are free"):
        load(folder)


def test_progress_is_shown_or_not_and_the_setting_of_transformers_stays(folder, capfd):
    from transformers.utils import logging as transformers_logging

    # In another dtype than stored, or there is nothing to wait for.
    load_model(folder, dtype="bfloat16", show_progress=False)
    quiet = capfd.readouterr().err
    load_model(folder, dtype="bfloat16", show_progress=True)
    loud = capfd.readouterr().err

    assert "Loading weights" not in quiet
    assert "Loading weights" in loud
    assert transformers_logging.is_progress_bar_enabled()


def test_progress_is_not_shown_where_nobody_sees_it(folder, capfd):
    load_model(folder, dtype="bfloat16")

    assert capfd.readouterr().err == ""


def test_a_folder_that_moved_still_loads(tmp_path, folder):
    moved = shutil.move(str(folder), str(tmp_path / "elsewhere"))

    assert load(moved).path == moved
