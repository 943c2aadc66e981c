"""The tokenizer of a model folder, read from its tokenizer.json without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from lmscope.frontend.tokenizer import TokenizerAdapter

__all__ = ["read_folder"]

# Classes that transformers loads from tokenizer.json as it stands. Any other class rebuilds
# its tokenizer from the vocabulary, and what comes out may differ from the file.
_GENERIC_CLASSES = {"TokenizersBackend", "PreTrainedTokenizer"}
# Model types for which transformers takes a generic class at its word.
_TRUSTED_MODEL_TYPES = {"llama", "qwen3", "smollm3"}
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


def read_folder(folder: Path) -> TokenizerAdapter | None:
    """The adapter over the folder's tokenizer.json; None when AutoTokenizer must decide.

    It must whenever it would change something: another class, tokens to be added, flags
    of added tokens that the two files give differently.
    """
    config = _read_json(folder / "tokenizer_config.json")
    tokenizer_class = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if (
        not (folder / "tokenizer.json").is_file()
        or tokenizer_class not in _GENERIC_CLASSES
        or _read_json(folder / "config.json").get("model_type") not in _TRUSTED_MODEL_TYPES
        or "auto_map" in config
        or "fast_tokenizer_files" in config
        or config.get("split_special_tokens")
    ):
        return None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = backend.get_added_tokens_decoder()
    if "added_tokens_decoder" in config:
        listed = {
            int(token_id): repr(AddedToken(**token))
            for token_id, token in config["added_tokens_decoder"].items()
        }
        if listed != {token_id: repr(token) for token_id, token in added.items()}:
            return None
    else:
        if (folder / "added_tokens.json").exists():
            return None
        config.update(_read_json(folder / "special_tokens_map.json"))

    special = {token.content for token in added.values() if token.special}
    named = {
        name: token if isinstance(token, str) else str(token["content"])
        for name, token in config.items()
        if name in _NAMED_TOKENS and token is not None
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    other = [name for name in config if name.endswith("_token") and name not in named]
    if (
        not special.issuperset(named.values())
        or not isinstance(extra, list)
        or not special.issuperset(str(t["content"]) if isinstance(t, dict) else t for t in extra)
        or any(isinstance(config[name], str) for name in other)
    ):
        return None
    return TokenizerAdapter.from_backend(
        backend, special_tokens=named, chat_template=_read_templates(folder, config)
    )


def _read_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Template files win over the entry in tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return texts["default"] if list(texts) == ["default"] else texts
    template: str | list[dict[str, str]] | None = config.get("chat_template")
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
