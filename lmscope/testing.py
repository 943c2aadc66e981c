"""What tests and tutorials stand on: a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lmscope.frontend.tokenizer import BYTE_LEVEL_ALPHABET, TokenizerAdapter

__all__ = ["byte_tokenizer"]


def byte_tokenizer(*, chat_template: str | Mapping[str, str] | None = None) -> TokenizerAdapter:
    """A tokenizer whose ids are the bytes of the text, made without files or network.

    0 to 255   the byte
    256        <END>, special, the EOS
    257        <PAD>, special
    258        <note>, added but not special
    """
    vocab = {character: byte for byte, character in enumerate(BYTE_LEVEL_ALPHABET)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<END>"), AddedToken("<PAD>")])
    backend.add_tokens([AddedToken("<note>", normalized=False)])
    return TokenizerAdapter.from_backend(
        backend,
        special_tokens={"eos_token": "<END>", "pad_token": "<PAD>"},
        chat_template=chat_template,
    )
