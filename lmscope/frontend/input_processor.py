"""InputProcessor: a prompt and its parameters become an EngineCoreRequest, or an error.

Everything that could go wrong with a request later is refused here, before the engine
sees it: the value, the limit, and what to do next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple

from lmscope.boundary import EngineCoreRequest
from lmscope.checks import as_integer, nearest, shown, wrong_type
from lmscope.frontend.detokenizer import TextStream
from lmscope.frontend.tokenizer import TokenizerAdapter
from lmscope.sampling_params import SamplingParams, check_for_model, with_generation_config

__all__ = ["InputProcessor"]

logger = logging.getLogger(__name__)

_PROMPT_KINDS = 'a text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# What vLLM takes in a prompt and lmscope does not.
_NOT_BUILT = (
    "prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs",
    "encoder_prompt", "decoder_prompt", "token_type_ids",
)  # fmt: skip


class _Prompt(NamedTuple):
    """A prompt as given: its text, its ids, or both."""

    text: str | None
    token_ids: tuple[int, ...] | None
    cache_salt: str | None


class InputProcessor:
    """Checks prompts and parameters against one model and one pool.

    tokenizer            None: prompts are token ids and outputs have no text
    vocab_size           ids from 0 to vocab_size - 1 have a logit
    max_model_len        most tokens of one request, prompt and output
    eos_token_id         the tokenizer's, which ends a text
    generation_eos_ids   `eos_token_id` of the generation config; these end it too
    max_pool_tokens      tokens whose keys and values fit in the pool at once
    max_logprobs         the most that logprobs and prompt_logprobs may ask for; -1: no limit
    num_embeddings       rows of the model's embedding; None: any id can run
    """

    def __init__(
        self,
        tokenizer: TokenizerAdapter | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_id: int | None,
        generation_eos_ids: int | Sequence[int] | None = None,
        max_pool_tokens: int,
        block_size: int,
        max_logprobs: int = 20,
        num_embeddings: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_id = eos_token_id
        self._generation_eos_ids = _known_ids(generation_eos_ids, vocab_size)
        self._max_pool_tokens = max_pool_tokens
        self._block_size = block_size
        self._max_logprobs = max_logprobs
        # A padded model knows more ids than its tokenizer, a tokenizer at times more than
        # its model; vLLM takes both in prompts.
        self._num_prompt_ids = max(vocab_size, tokenizer.vocab_size if tokenizer else 0)
        if num_embeddings is not None:
            # An id without an embedding would kill the engine, with everybody in it.
            self._num_prompt_ids = min(self._num_prompt_ids, num_embeddings)

    def process(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        arrival_time: float | None = None,
        want_text: bool = False,
        add_special_tokens: bool = True,
    ) -> EngineCoreRequest:
        """The request that the engine gets; ValueError or TypeError when it cannot run.

        prompt               a text, a list of token ids, or a mapping with "prompt" or
                             "prompt_token_ids" (or both: the ids run, the text is shown)
                             and perhaps "cache_salt"
        arrival_time         seconds since the epoch; now unless given
        want_text            decode a prompt that was given as ids, since somebody looks on
        add_special_tokens   False for a text that a chat template has written
        """
        if not isinstance(params, SamplingParams):
            wrong_type("sampling_params", params, "a SamplingParams")
        given = _read_prompt(prompt)
        token_ids, offsets = given.token_ids, None
        if token_ids is None:
            token_ids, offsets = self._tokenize(given.text or "", add_special_tokens)
        self._check_tokens(token_ids)
        params = self._complete(params, len(token_ids))
        text, ends = self._text_and_ends(given.text, token_ids, offsets, want_text)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_id=self._eos_token_id,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=given.cache_salt,
            priority=as_integer("priority", priority, -(2**63)),
            prompt=text,
            prompt_offsets=ends,
        )

    # -- the prompt ------------------------------------------------------------

    def _tokenize(
        self, text: str, add_special_tokens: bool
    ) -> tuple[tuple[int, ...], list[tuple[int, int]] | None]:
        if self._tokenizer is None:
            raise ValueError(
                f"prompt is the text {shown(text)} and the model has no tokenizer; "
                "give a list of token ids"
            )
        token_ids, offsets = self._tokenizer.encode(text, add_special_tokens)
        bos = self._tokenizer.bos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:
            logger.warning(
                "the prompt begins with two BOS tokens (id %d): one is in the text, the "
                "tokenizer added the other; take it out of the text, or use chat()",
                bos,
            )
        return tuple(token_ids), offsets

    def _text_and_ends(
        self,
        text: str | None,
        token_ids: tuple[int, ...],
        offsets: list[tuple[int, int]] | None,
        want_text: bool,
    ) -> tuple[str | None, tuple[int, ...]]:
        """The prompt's text and where in it the text of each token ends."""
        if text is None:
            if self._tokenizer is None or not want_text:
                return None, ()
            return self._decode(token_ids, skip_special_tokens=False)
        if offsets is not None:
            return text, _ends_of(offsets)
        if self._tokenizer is not None:
            for skip_special_tokens in (True, False):
                decoded, ends = self._decode(token_ids, skip_special_tokens)
                if decoded == text:
                    return text, ends
        # The ids say something else than the text, or nothing without a tokenizer. Nobody
        # can tell which token stands for what, so all of it is the last one's.
        return text, (0,) * (len(token_ids) - 1) + (len(text),)

    def _decode(
        self, token_ids: tuple[int, ...], skip_special_tokens: bool
    ) -> tuple[str, tuple[int, ...]]:
        assert self._tokenizer is not None
        stream = TextStream(self._tokenizer, skip_special_tokens=skip_special_tokens)
        pieces = [stream.step(token_id) for token_id in token_ids]
        return "".join(pieces), tuple(accumulate(map(len, pieces)))

    def _check_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Refuse ids that do not exist, and lengths that cannot run or cannot end."""
        num_tokens = len(token_ids)
        if not num_tokens:
            raise ValueError(
                "prompt has 0 tokens, a request needs at least 1; give some text or token ids"
            )
        largest = max(token_ids)
        if largest >= self._num_prompt_ids:
            raise ValueError(
                f"prompt has token id {largest} at position {token_ids.index(largest)}, the "
                f"largest is {self._num_prompt_ids - 1}; check that it comes from this model's "
                "tokenizer"
            )
        if num_tokens >= self._max_model_len:
            most, wanted = self._max_model_len - 1, num_tokens + 64
            shorter = f"shorten the prompt to {most} tokens or " if most else ""
            # Left to itself, max_model_len is what the pool holds.
            larger = (
                f" and num_kv_blocks={-(-wanted // self._block_size) + 1} or more"
                if wanted > self._max_pool_tokens
                else ""
            )
            raise ValueError(
                f"prompt has {num_tokens} tokens, max_model_len is {self._max_model_len}, and one "
                f"is for the output; {shorter}load the model with max_model_len={wanted}{larger}"
            )
        if num_tokens > self._max_pool_tokens:
            needed = -(-num_tokens // self._block_size)
            usable = self._max_pool_tokens // self._block_size
            raise ValueError(
                f"prompt has {num_tokens} tokens and needs {needed} blocks of "
                f"{self._block_size}, the KV cache has {usable} usable ones; shorten the prompt "
                f"to {self._max_pool_tokens} tokens or load the model with "
                f"num_kv_blocks={needed + 1} or more"
            )

    # -- the parameters --------------------------------------------------------

    def _complete(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters with everything filled in that the model decides."""
        self._check_strings(params)
        params, stop_ids = with_generation_config(
            params, self._eos_token_id, self._generation_eos_ids
        )
        check_for_model(
            params,
            vocab_size=self._vocab_size,
            max_logprobs=self._max_logprobs,
            stop_ids=stop_ids,
        )
        room = self._max_model_len - num_prompt_tokens
        # The last token is sampled and never computed, so it needs no place in the pool.
        room_in_pool = self._max_pool_tokens + 1 - num_prompt_tokens
        if params.min_tokens > min(room, room_in_pool):
            # vLLM would neither finish nor schedule this request again.
            limit = (
                f"max_model_len is {self._max_model_len}"
                if room <= room_in_pool
                else f"the KV cache holds {self._max_pool_tokens} tokens"
            )
            raise ValueError(
                f"min_tokens is {params.min_tokens}, {limit} and the prompt has "
                f"{num_prompt_tokens} tokens; use min_tokens={min(room, room_in_pool)} or less, "
                "or a shorter prompt"
            )
        if params.max_tokens is None:
            return params.replace(max_tokens=min(room, room_in_pool))
        if params.max_tokens > room_in_pool:
            # A request that outgrows the pool when it is alone would preempt itself for
            # ever; it ends with "length" instead.
            return params.replace(max_tokens=room_in_pool)
        return params

    def _check_strings(self, params: SamplingParams) -> None:
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValueError(
                        f"{name} is {shown(list(getattr(params, name)))} and the model has no "
                        "tokenizer; use stop_token_ids or logit_bias with token ids"
                    )
            return
        for word in params.bad_words:
            sequences = self._tokenizer.encode_bad_words([word])
            largest = max((max(ids) for ids in sequences), default=-1)
            if not sequences or largest >= self._vocab_size:
                fault = f"token id {largest}, the model's largest is {self._vocab_size - 1}"
                raise ValueError(
                    f"bad_words holds {shown(word)}, which has "
                    f"{fault if sequences else 'no token'}; remove it"
                )
        if not params.skip_special_tokens:
            return
        for string in params.stop:
            token_id = self._tokenizer.token_to_id(string)
            if token_id in self._tokenizer.all_special_ids:
                logger.warning(
                    "stop string %r is a special token, whose text is left out, so it will not "
                    "be found; use stop_token_ids=[%d], or skip_special_tokens=False",
                    string,
                    token_id,
                )


def _read_prompt(prompt: Any) -> _Prompt:
    if isinstance(prompt, str):
        return _Prompt(_checked_text("prompt", prompt), None, None)
    if not isinstance(prompt, Mapping):
        return _Prompt(None, _checked_ids(prompt), None)
    for key, value in prompt.items():
        if key in _NOT_BUILT and value is not None:
            raise ValueError(
                f"prompt has {key}, which lmscope cannot use yet; give {_PROMPT_KINDS}"
            )
        if key not in _PROMPT_KEYS and key not in _NOT_BUILT:
            raise ValueError(
                f"prompt has the unknown key {key!r}; {nearest(str(key), _PROMPT_KEYS)}"
            )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise ValueError(
            f"prompt has neither 'prompt' nor 'prompt_token_ids', its keys are {list(prompt)}; "
            f"give {_PROMPT_KINDS}"
        )
    cache_salt = prompt.get("cache_salt")
    if cache_salt is not None and not _checked_text("cache_salt", cache_salt):
        raise ValueError("cache_salt is empty; give at least one character or leave it out")
    return _Prompt(
        None if text is None else _checked_text("prompt", text),
        None if token_ids is None else _checked_ids(token_ids),
        cache_salt,
    )


def _checked_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        wrong_type(name, text, "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair at position {error.start} "
            f"({shown(text[error.start])}), which is no character; remove it or decode the text "
            "with errors='replace'"
        ) from error
    return text


def _checked_ids(token_ids: Any) -> tuple[int, ...]:
    """Token ids as plain ints; arrays, tensors and numpy's integers are taken too."""
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes) or not hasattr(token_ids, "__iter__"):
        wrong_type("prompt", token_ids, _PROMPT_KINDS)
    return tuple(_plain_ids(token_ids))


def _plain_ids(token_ids: Any) -> Iterator[int]:
    for position, item in enumerate(token_ids):
        if type(item) is int:
            token_id = item
        elif isinstance(item, Integral) and not isinstance(item, bool):
            token_id = int(item)
        else:
            several = "" if not isinstance(item, str | list | tuple) else (
                "; several prompts are for generate(), one by one for submit()"
            )  # fmt: skip
            raise TypeError(
                f"prompt has {shown(item)} at position {position}; it takes token ids, which "
                f"are integers{several}"
            )
        if token_id < 0:
            raise ValueError(
                f"prompt has token id {token_id} at position {position}, the smallest is 0; "
                "check that it comes from this model's tokenizer"
            )
        yield token_id


def _ends_of(offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """For each token the end of its text.

    Tokens that share a character all have its span; it counts for the last of them.
    """
    ends = []
    next_start = max((end for _, end in offsets), default=0)
    for start, end in reversed(offsets):
        ends.append(min(end, next_start) if start < end else 0)
        if start < end:
            next_start = start
    return tuple(accumulate(reversed(ends), max))


def _known_ids(generation_eos_ids: int | Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The ids of the generation config, without those that cannot be sampled."""
    if generation_eos_ids is None:
        return ()
    if isinstance(generation_eos_ids, int):
        generation_eos_ids = (generation_eos_ids,)
    known = tuple(token_id for token_id in generation_eos_ids if 0 <= token_id < vocab_size)
    if len(known) < len(generation_eos_ids):
        logger.warning(
            "the generation config ends texts with the ids %s, of which only %s are below the "
            "vocabulary size %d; the others are left out",
            list(generation_eos_ids),
            list(known),
            vocab_size,
        )
    return known
