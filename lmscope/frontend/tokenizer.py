"""One face for every tokenizer: text to ids, ids to text, messages to a prompt.

The rest of lmscope sees a `TokenizerAdapter` only. It works on a `tokenizers.Tokenizer`,
so neither torch nor transformers is imported for a model folder with a tokenizer.json;
only chat templates, and tokenizers that exist as Python code, need transformers.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders

from lmscope.checks import nearest

__all__ = ["BYTE_LEVEL_ALPHABET", "REPLACEMENT", "Encoding", "TokenTexts", "TokenizerAdapter"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoding puts where bytes make no character."""

logger = logging.getLogger(__name__)

_CHAT_OPTIONS = (
    "add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents",
)  # fmt: skip


class Encoding(NamedTuple):
    """Token ids of a text.

    offsets   per token its (start, end) in the text, in characters; tokens that stand for
              no text, such as a BOS, have an empty span. None when the tokenizer cannot say.
    """

    ids: list[int]
    offsets: list[tuple[int, int]] | None


class TokenTexts(dict[int, str]):
    """What each token decodes to alone. A token is decoded when it is first asked for.

    decode    text of several tokens together
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__()
        self.decode = decode

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self.decode([token_id])
        return text


class TokenizerAdapter(abc.ABC):
    """A tokenizer as lmscope uses it; make one with a `from_` method.

    special_tokens   named ones, for example {"eos_token": "</s>"}; chat templates see them
    chat_template    Jinja text, several by name, or None
    token_texts      by whether special tokens are skipped
    """

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None,
    ) -> None:
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.token_texts = {
            skips: TokenTexts(partial(self.decode, skip_special_tokens=skips))
            for skips in (False, True)
        }

    @staticmethod
    def from_backend(
        backend: Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> TokenizerAdapter:
        """Wrap a tokenizer of the tokenizers library; it is not changed."""
        return _BackendAdapter(backend, special_tokens or {}, chat_template)

    @staticmethod
    def from_transformers(tokenizer: Any) -> TokenizerAdapter:
        """Wrap a tokenizer of transformers."""
        named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            return _BackendAdapter(backend, named, tokenizer.chat_template)
        return _PythonAdapter(tokenizer, named)

    @staticmethod
    def from_folder(folder: str | Path, *, trust_remote_code: bool = False) -> TokenizerAdapter:
        """The tokenizer of a model folder, the same as transformers' AutoTokenizer makes.

        Reads tokenizer.json directly where AutoTokenizer would use it as it stands (a
        twentieth of the time), and asks AutoTokenizer everywhere else.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r} to load a tokenizer from")
        from lmscope.frontend.tokenizer_folder import read_folder  # which imports this module

        adapter = read_folder(folder)
        if adapter is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
            adapter = TokenizerAdapter.from_transformers(tokenizer)
        return adapter

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""

    @property
    @abc.abstractmethod
    def all_special_ids(self) -> frozenset[int]:
        """The tokens that decoding leaves out when it skips special tokens."""

    @property
    @abc.abstractmethod
    def added_tokens(self) -> Mapping[int, str]:
        """Texts of all tokens that were added to the vocabulary, special or not."""

    @property
    @abc.abstractmethod
    def is_byte_level(self) -> bool:
        """Whether a token stands for the same bytes whatever is beside it.

        Behind whole characters a token of whole characters then adds its own text.
        """

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Token ids of `text`, never cut and never padded."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; unknown ids add nothing, a cut character becomes U+FFFD."""

    @abc.abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """The entry in the vocabulary, in the vocabulary's own spelling; None if unknown."""

    @abc.abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of such an entry; None if there is none."""

    def id_to_piece(self, token_id: int) -> str:
        """What a view shows for one token: its text, or its bytes as `<0xF0>`.

        The bytes are shown when they are only a part of a character; the bare number when
        the tokenizer does not know the id.
        """
        token = self.id_to_token(token_id)
        if token is None:
            return str(token_id)
        if token_id in self.added_tokens:
            return token
        text = self.decode([token_id], skip_special_tokens=False)
        if text and REPLACEMENT not in text:
            # A decoder that strips the first space of a text has stripped this one's.
            return f" {text}" if token.startswith("\u2581") and text[0] != " " else text
        data = _byte_level_bytes(token)
        if data is None:
            return token.replace("\u2581", " ")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write `words`, at the beginning of a text and inside it.

        A word has a second sequence where a space before it changes its first token and
        not the number of tokens. Words without any token have none.
        """
        sequences = []
        for word in words:
            bare, spaced = (
                tuple(self.encode(space + word.lstrip(), add_special_tokens=False).ids)
                for space in ("", " ")
            )
            if bare:
                sequences.append(bare)
            if bare and spaced[:1] != bare[:1] and len(spaced) == len(bare):
                sequences.append(spaced)
        return tuple(sequences)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **template_variables: Any,
    ) -> str:
        """One conversation as the prompt that the model was trained on.

        Tokenize the result with add_special_tokens=False: the template has written them.
        chat_template   Jinja text, or the name of one of the model's templates

        Rendered by transformers, in its sandbox and with its functions, so the text is the
        one its tokenizers produce. ValueError when there is no template, or when the
        template refuses the messages; TypeError for a variable that it does not use.
        """
        template = self._find_template(chat_template, tools)
        for name in template_variables:
            if name not in template:
                raise TypeError(
                    f"{name} is no option of a chat and no variable of this template; "
                    f"{nearest(name, _CHAT_OPTIONS)}"
                )
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None and name not in template:
                logger.warning("the chat template does not use %s, so they have no effect", name)
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt are both set; pass "
                "add_generation_prompt=False to continue the last message"
            )
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[_checked_messages(messages)],
                tools=None if tools is None else list(tools),
                documents=None if documents is None else [dict(item) for item in documents],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.special_tokens, **template_variables},
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return str(rendered[0])

    def _find_template(self, wanted: str | None, tools: Sequence[Any] | None) -> str:
        own = self.chat_template
        if isinstance(own, Mapping):
            if wanted is not None:
                return own.get(wanted, wanted)
            name = "tool_use" if tools is not None and "tool_use" in own else "default"
            if name in own:
                return own[name]
            raise ValueError(
                f"the model has the chat templates {sorted(own)} and none named 'default'; "
                "pass chat_template= with one of these names"
            )
        template = own if wanted is None else wanted
        if template is None:
            raise ValueError(
                "the model has no chat template, as base models have none; pass "
                "chat_template= with Jinja text, or use generate() with a plain prompt"
            )
        return template

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


class _BackendAdapter(TokenizerAdapter):
    """Over a tokenizer of the tokenizers library."""

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None,
    ) -> None:
        if backend.truncation is not None or backend.padding is not None:
            backend = Tokenizer.from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        self.backend = backend
        super().__init__(special_tokens, chat_template)

    @cached_property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab().values(), default=-1) + 1

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        tokens = self.backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in tokens if token.special)

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        tokens = self.backend.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in tokens}

    @cached_property
    def is_byte_level(self) -> bool:
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        return Encoding(encoding.ids, encoding.offsets)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)


class _PythonAdapter(TokenizerAdapter):
    """Over a tokenizer of transformers that is Python code; it knows no offsets."""

    def __init__(self, tokenizer: Any, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        super().__init__(special_tokens, tokenizer.chat_template)

    @cached_property
    def vocab_size(self) -> int:
        return max(self._tokens, default=-1) + 1

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        return {id_: str(token) for id_, token in self._tokenizer.added_tokens_decoder.items()}

    @property
    def is_byte_level(self) -> bool:
        return False  # what its code does is not known

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Encoding(list(ids), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if token_id in self._tokens]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the keys whose value is None, which templates would print."""
    if isinstance(messages, (str, Mapping)):
        raise TypeError(
            f"messages is a {type(messages).__name__}; it takes a list such as "
            '[{"role": "user", "content": "Hi"}]'
        )
    if not messages:
        raise ValueError("messages is empty; a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(
                f"messages holds {message!r}; each is a mapping with 'role' and 'content'"
            )
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


def _byte_level_bytes(token: str) -> bytes | None:
    """The bytes that a byte-level vocabulary entry stands for; None if it is none."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return None


def _byte_level_alphabet() -> list[str]:
    """The character that byte-level vocabularies write for each byte, in order of the bytes.

    Printable Latin-1 stands for itself; the rest is moved to U+0100 and up, in order.
    """
    alphabet = []
    moved = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + moved))
            moved += 1
    return alphabet


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
"""The spelling of each byte in byte-level vocabularies."""
_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_LEVEL_ALPHABET)}
