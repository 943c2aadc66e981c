"""The adapter answers as the tokenizers it stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lmscope.frontend.tokenizer import BYTE_LEVEL_ALPHABET, TokenizerAdapter
from lmscope.testing import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Hello the"}]
TEXTS = [
    "",
    " a  b ",
    "Hello 12345, world!\n\n",
    "日本語 🌶 é",
    "<END><note> x <END>",
    "tail\ttab don't",
]


def make_backend() -> Tokenizer:
    """Byte-level BPE with a few merges, an EOS, a special and an added token."""
    vocab = {character: byte for byte, character in enumerate(BYTE_LEVEL_ALPHABET)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "l"), ("1", "2")]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<END>"), AddedToken("<BOS>")])
    backend.add_tokens([AddedToken("<note>", normalized=False)])
    return backend


def make_transformers(backend: Tokenizer | None = None, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend or make_backend(),
        **{"eos_token": "<END>", "bos_token": "<BOS>", "chat_template": TEMPLATE, **options},
    )


def save(
    folder: Path, tokenizer: PreTrainedTokenizerBase, model_type: str = "llama", **config: Any
) -> Path:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.fixture
def without_auto_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("AutoTokenizer was used")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)


def assert_same(adapter: TokenizerAdapter, reference: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = reference.encode(text, add_special_tokens=special)
            assert adapter.encode(text, special).ids == ids
            for skip in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skip)
                assert adapter.decode(ids, skip) == expected
    assert adapter.eos_token_id == reference.eos_token_id
    assert adapter.bos_token_id == reference.bos_token_id
    assert adapter.vocab_size == max(reference.get_vocab().values()) + 1
    assert adapter.all_special_ids >= set(reference.all_special_ids)
    if reference.chat_template is not None:
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            expected = reference.apply_chat_template(MESSAGES, tokenize=False, **options)
            assert adapter.apply_chat_template(MESSAGES, **options) == expected


# -- the adapters --------------------------------------------------------------------


def test_a_backend_gives_what_transformers_gives_over_it():
    adapter = TokenizerAdapter.from_backend(
        make_backend(),
        special_tokens={"eos_token": "<END>", "bos_token": "<BOS>"},
        chat_template=TEMPLATE,
    )

    assert_same(adapter, make_transformers())


def test_a_transformers_tokenizer_keeps_its_answers():
    assert_same(TokenizerAdapter.from_transformers(make_transformers()), make_transformers())


def test_a_tokenizer_in_python_gives_ids_and_text_without_offsets():
    adapter = TokenizerAdapter.from_transformers(ByT5Tokenizer())

    assert_same(adapter, ByT5Tokenizer())
    assert adapter.encode("é").offsets is None
    assert adapter.decode([100, 99_999]) == ByT5Tokenizer().decode([100])
    assert (adapter.id_to_token(99_999), adapter.token_to_id("nothing")) == (None, None)


def test_offsets_count_characters():
    assert byte_tokenizer().encode("aé<note>").offsets == [(0, 1), (1, 2), (1, 2), (2, 8)]


def test_texts_are_never_cut_or_padded_and_the_given_tokenizer_is_left_alone():
    backend = make_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)

    adapter = TokenizerAdapter.from_backend(backend)

    assert adapter.encode("abcd").ids == [97, 98, 99, 100]
    assert backend.truncation is not None
    assert backend.padding is not None


def test_an_unknown_id_has_no_text_and_no_entry():
    adapter = byte_tokenizer()

    assert adapter.decode([97, 262]) == "a"
    assert (adapter.id_to_token(262), adapter.token_to_id("nothing")) == (None, None)
    assert adapter.eos_token_id == 256
    assert adapter.bos_token_id is None


@pytest.mark.parametrize(
    ("token_id", "piece"),
    [(97, "a"), (32, " "), (10, "\n"), (0xF0, "<0xF0>"), (256, "<END>"), (258, "<note>")],
)
def test_a_view_shows_text_or_bytes(token_id: int, piece: str):
    assert byte_tokenizer().id_to_piece(token_id) == piece


def test_a_view_shows_the_number_of_a_token_that_the_tokenizer_lacks():
    assert byte_tokenizer().id_to_piece(262) == "262"


def test_a_view_shows_pieces_of_sentencepiece_with_their_space():
    backend = Tokenizer(models.WordLevel({"▁world": 0, "wor": 1, "▁": 2, "<0xF0>": 3}, "wor"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    adapter = TokenizerAdapter.from_backend(backend)

    assert [adapter.id_to_piece(id_) for id_ in range(4)] == [" world", "wor", " ", "<0xF0>"]


def test_a_view_shows_the_bytes_of_a_piece_of_several_cut_characters():
    alphabet = BYTE_LEVEL_ALPHABET
    backend = Tokenizer(models.BPE(vocab={alphabet[0x97] + alphabet[0xE6]: 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()

    assert TokenizerAdapter.from_backend(backend).id_to_piece(0) == "<0x97><0xE6>"


def test_bad_words_are_written_with_and_without_a_space_before_them():
    adapter = TokenizerAdapter.from_backend(make_backend())  # "the" and " the" are tokens

    assert adapter.encode_bad_words(["the", " the", "ab", " "]) == (
        (257,),
        (258,),
        (257,),
        (258,),
        (97, 98),  # " ab" has one token more: its second is the word at the beginning
    )


# -- folders -------------------------------------------------------------------------


def with_bos() -> Tokenizer:
    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<BOS> $A", pair="<BOS> $A $B", special_tokens=[("<BOS>", 262)]
    )
    return backend


def with_digits() -> Tokenizer:
    backend = make_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return backend


@pytest.mark.parametrize("make", [make_backend, with_bos, with_digits])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_folder_is_read_as_auto_tokenizer_reads_it(
    make: Callable[[], Tokenizer], model_type: str, tmp_path: Path
):
    folder = save(tmp_path, make_transformers(make()), model_type)

    assert_same(TokenizerAdapter.from_folder(folder), AutoTokenizer.from_pretrained(folder))


def test_a_plain_folder_is_read_without_auto_tokenizer(
    tmp_path: Path, without_auto_tokenizer: None
):
    folder = save(tmp_path, make_transformers())

    assert TokenizerAdapter.from_folder(folder).encode("the").ids == [257]


def test_a_folder_is_read_without_torch_and_transformers(tmp_path: Path):
    folder = save(tmp_path, make_transformers())
    code = (
        "import sys; from lmscope.frontend.tokenizer import TokenizerAdapter as T; "
        f"t = T.from_folder({str(folder)!r}); t.decode(t.encode('the').ids); "
        "from lmscope.testing import byte_tokenizer; byte_tokenizer(); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.stdout.strip() == "set()", result.stderr


def old_style(folder: Path) -> None:
    """As transformers 4 saved it: added tokens listed in tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    config["added_tokens_decoder"] = {str(token.pop("id")): token for token in tokens}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<BOS>"}))


def test_added_tokens_listed_twice_are_fine(tmp_path: Path, without_auto_tokenizer: None):
    folder = save(tmp_path, make_transformers())
    old_style(folder)

    assert TokenizerAdapter.from_folder(folder).eos_token_id == 261


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def list_one_more(folder: Path) -> None:
    old_style(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["264"] = {"content": "<new>", "special": True}
    path.write_text(json.dumps(config))


def list_other_flags(folder: Path) -> None:
    old_style(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["263"]["lstrip"] = True
    path.write_text(json.dumps(config))


def map_specials(folder: Path) -> None:
    tokens = {"eos_token": {"content": "<BOS>"}, "pad_token": "<END>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))


@pytest.mark.parametrize(
    "change",
    [
        old_style,
        list_one_more,
        list_other_flags,
        map_specials,
        change_config(pad_token="<PAD>"),
        change_config(eos_token="<note>"),
        change_config(additional_special_tokens=["<one>", "<END>"]),
        change_config(image_token="<image>"),
        change_config(tokenizer_class="GPT2TokenizerFast"),
        change_config(tokenizer_class="Qwen2Tokenizer"),
        change_config(add_bos_token=True),
        change_config(split_special_tokens=True),
    ],
)
def test_unusual_folders_are_read_as_auto_tokenizer_reads_them(
    change: Callable[[Path], None], tmp_path: Path
):
    folder = save(tmp_path, make_transformers(with_digits()))
    change(folder)

    assert_same(TokenizerAdapter.from_folder(folder), AutoTokenizer.from_pretrained(folder))


def test_a_folder_of_another_kind_goes_to_auto_tokenizer(tmp_path: Path):
    vocab = {character: byte for byte, character in enumerate(BYTE_LEVEL_ALPHABET)}
    vocab["<|endoftext|>"] = 256
    folder = save(tmp_path, GPT2Tokenizer(vocab=vocab, merges=[]), "gpt2")

    assert_same(TokenizerAdapter.from_folder(folder), AutoTokenizer.from_pretrained(folder))


def test_a_folder_without_tokenizer_json_goes_to_auto_tokenizer(tmp_path: Path):
    folder = save(tmp_path, ByT5Tokenizer(), "t5")

    assert_same(TokenizerAdapter.from_folder(folder), ByT5Tokenizer())


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        TokenizerAdapter.from_folder(tmp_path / "nowhere")


def test_the_demo_model_is_read_as_auto_tokenizer_reads_it(demo_model: Path):
    reference = AutoTokenizer.from_pretrained(demo_model)

    assert_same(TokenizerAdapter.from_folder(demo_model), reference)


def test_the_demo_model_is_read_without_auto_tokenizer(
    demo_model: Path, without_auto_tokenizer: None
):
    assert TokenizerAdapter.from_folder(demo_model).vocab_size == 49_152


# -- chat templates ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("{{ strftime_now('%Y') }} {{ messages | tojson }}", {}),
        ("{{ bos_token }}{{ messages[0].content }}{{ extra }}", {"extra": "more"}),
        ("{{ tools | tojson(indent=2) }}{{ documents }}", {"tools": [{"name": "é<"}]}),
        ("{{ messages[-1].tool_calls is defined }}{{ messages[-1].reasoning_content }}", {}),
        ("{% set s = namespace(n=0) %}{% for m in messages %}{% break %}{% endfor %}{{ s.n }}", {}),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", {}),
    ],
)  # fmt: skip
def test_templates_see_what_they_see_in_transformers(template: str, options: dict[str, Any]):
    messages = [
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "", "tool_calls": None, "reasoning": "because"},
    ]
    reference = make_transformers(chat_template=template)
    adapter = TokenizerAdapter.from_transformers(reference)

    text = adapter.apply_chat_template(messages, add_generation_prompt=True, **options)

    expected = reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert text == expected


def test_t1_a_template_s_text_gets_no_second_bos():
    adapter = TokenizerAdapter.from_transformers(
        make_transformers(with_bos(), chat_template="{{ bos_token }}{{ messages[0].content }}")
    )
    text = adapter.apply_chat_template([{"role": "user", "content": "a"}])

    assert adapter.encode(text, add_special_tokens=False).ids == [262, 97]
    assert adapter.encode(text).ids == [262, 262, 97]


def test_t2_a_missing_template_says_how_to_pass_one():
    adapter = byte_tokenizer()

    with pytest.raises(ValueError, match=r"no chat template.*chat_template="):
        adapter.apply_chat_template(MESSAGES)
    assert adapter.apply_chat_template(MESSAGES, chat_template="{{ messages | length }}") == "2"


def test_templates_can_be_chosen_by_name():
    adapter = byte_tokenizer(
        chat_template={"default": "default", "tool_use": "tools", "short": "short"}
    )

    assert adapter.apply_chat_template(MESSAGES) == "default"
    assert adapter.apply_chat_template(MESSAGES, tools=[{"name": "x"}]) == "tools"
    assert adapter.apply_chat_template(MESSAGES, chat_template="short") == "short"
    assert adapter.apply_chat_template(MESSAGES, chat_template="own") == "own"


def test_templates_without_a_default_are_named():
    adapter = byte_tokenizer(chat_template={"rag": "x", "short": "y"})

    with pytest.raises(ValueError, match=r"\['rag', 'short'\].*chat_template="):
        adapter.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("named", [True, False])
def test_template_files_of_a_folder_win(named: bool, tmp_path: Path):
    folder = save(tmp_path, make_transformers(), chat_template="from the config")
    (folder / "chat_template.jinja").write_text("from the file")
    if named:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "short.jinja").write_text("by name")

    adapter = TokenizerAdapter.from_folder(folder)

    assert adapter.apply_chat_template(MESSAGES) == "from the file"
    assert adapter.chat_template == AutoTokenizer.from_pretrained(folder).chat_template


def test_templates_listed_in_the_config_are_found(tmp_path: Path):
    listed = [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]
    folder = save(tmp_path, make_transformers(), chat_template=listed)
    (folder / "chat_template.jinja").unlink()

    adapter = TokenizerAdapter.from_folder(folder)

    assert adapter.chat_template == {"default": "one", "rag": "two"}
    assert adapter.chat_template == AutoTokenizer.from_pretrained(folder).chat_template


def test_a_template_that_refuses_is_quoted():
    adapter = byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")

    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        adapter.apply_chat_template(MESSAGES)


def test_an_option_that_nothing_uses_is_refused():
    adapter = byte_tokenizer(chat_template=TEMPLATE + "{{ enable_thinking }}")

    assert adapter.apply_chat_template(MESSAGES, enable_thinking=False).endswith("False")
    with pytest.raises(TypeError, match=r"add_generation_promt is no .*add_generation_prompt"):
        adapter.apply_chat_template(MESSAGES, add_generation_promt=True)


@pytest.mark.parametrize("options", [{"tools": [{"name": "x"}]}, {"documents": [{"title": "x"}]}])
def test_tools_and_documents_that_have_no_effect_are_warned_of(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    adapter = byte_tokenizer(chat_template=TEMPLATE)

    assert adapter.apply_chat_template(MESSAGES, **options) == adapter.apply_chat_template(MESSAGES)
    assert f"does not use {next(iter(options))}" in caplog.text


def test_continuing_and_prompting_together_is_refused():
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        byte_tokenizer(chat_template=TEMPLATE).apply_chat_template(
            MESSAGES, add_generation_prompt=True, continue_final_message=True
        )


@pytest.mark.parametrize(
    ("messages", "error"),
    [([], ValueError), ("Hi", TypeError), ({"role": "user"}, TypeError), (["Hi"], TypeError)],
)
def test_what_is_no_conversation_is_refused(messages: Any, error: type[Exception]):
    with pytest.raises(error, match="messages"):
        byte_tokenizer(chat_template=TEMPLATE).apply_chat_template(messages)
