"""SamplingParams: how a request is sampled and when it ends, with vLLM's names and rules."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lmscope.checks import (
    as_integer,
    as_number,
    as_strings,
    as_token_id,
    as_token_ids,
    nearest,
    shown,
    wrong_type,
)

__all__ = [
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "check_for_model",
    "with_generation_config",
]

logger = logging.getLogger(__name__)

_MIN_TEMPERATURE = 0.01

# As in later vLLM: each continuation is a request of its own, and a typing error must not
# start a billion of them.
_MAX_N = 16_384

# What vLLM takes and lmscope does not: the value that asks for nothing, and what to do.
_NOT_BUILT: dict[str, tuple[object, str]] = {
    "structured_outputs": (None, "output cannot be held to a schema or grammar yet"),
    "logits_processors": (None, "use logit_bias, bad_words or allowed_token_ids"),
    "truncate_prompt_tokens": (None, "shorten the prompt before it is submitted"),
    "flat_logprobs": (False, "log probabilities are mappings, one per position"),
    "extra_args": (None, "no extension reads it"),
    "skip_clone": (False, "SamplingParams is frozen, so it is never cloned"),
    "best_of": (None, "use n and choose among the outputs"),
}


class RequestOutputKind(enum.IntEnum):
    """What a caller receives: all so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(enum.IntEnum):
    """How the next token is chosen; a greedy request is GREEDY whatever its seed."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class _NamesTheNearest(msgspec.StructMeta):
    """Answers an unknown parameter with the nearest known one.

    A struct cannot have an `__init__` of its own, so this is the only place to say it.
    """

    # Hidden from type checkers, which read the parameters from the fields.
    if not TYPE_CHECKING:

        def __call__(cls, *args: object, **given: Any) -> Any:  # noqa: N805 - it is a metaclass
            if args:
                raise TypeError(
                    f"SamplingParams was given {shown(args[0])} without a name; "
                    "write for example SamplingParams(temperature=0.8)"
                )
            return super().__call__(**_known(given, cls.__struct_fields__))


class SamplingParams(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    gc=False,
    forbid_unknown_fields=True,
    metaclass=_NamesTheNearest,
):
    """How one request is sampled and when it ends.

    Frozen, so an engine never changes what a caller holds; `params.replace(seed=1)` makes
    a changed copy. A value that is out of range raises ValueError, one of the wrong type
    TypeError; both name the parameter, the value and what is allowed. Defaults, ranges and
    the order of checks are vLLM's (0.16). What only a model can tell, such as whether a
    token id exists, `check_for_model` checks.

    n                   continuations of the prompt
    temperature         0 is greedy, which sets top_p, top_k and min_p back to off; above 0
                        and below 0.01 becomes 0.01, with a warning
    top_k               0 and -1: off
    seed                -1 and None: no seed of its own
    stop                strings that end the text; cut off unless include_stop_str_in_output
    max_tokens          None: as many as max_model_len leaves room for
    min_tokens          until then neither EOS nor stop tokens can be sampled
    logprobs            log probabilities per token: k of the most likely beside the chosen
                        one; True is 1, False is None; -1 is the whole vocabulary
    prompt_logprobs     the same for the prompt, which then does not read the prefix cache
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_reading_prefix_cache: bool | None = None

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some parameters changed, checked like a new one."""
        return msgspec.structs.replace(self, **_known(changes, self.__struct_fields__))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def sampling_type(self) -> SamplingType:
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def output_text_buffer_length(self) -> int:
        """Characters held back while running, so that no piece of a stop string gets out."""
        if self.include_stop_str_in_output:
            return 0
        return max(map(len, self.stop), default=1) - 1

    def __post_init__(self) -> None:
        # Also runs when a struct is decoded, so it must leave its own result as it is.
        self._settle_numbers()
        self._settle_lengths()
        self._settle_lists()
        self._settle_flags()
        if self.is_greedy:
            self._settle_greedy()

    def _settle_numbers(self) -> None:
        put = partial(msgspec.structs.force_setattr, self)
        put("n", as_integer("n", self.n, 1, _MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, as_number(name, getattr(self, name), "in [-2, 2]", lambda x: -2 <= x <= 2))
        put(
            "repetition_penalty",
            as_number("repetition_penalty", self.repetition_penalty, "above 0", lambda x: x > 0),
        )
        put(
            "temperature",
            as_number("temperature", self.temperature, "at least 0", lambda x: x >= 0),
        )
        if 0 < self.temperature < _MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is below %g and was raised to it: smaller values lose all "
                "precision; use 0 for greedy",
                self.temperature,
                _MIN_TEMPERATURE,
            )
            put("temperature", _MIN_TEMPERATURE)
        put("top_p", as_number("top_p", self.top_p, "in (0, 1]", lambda x: 0 < x <= 1))
        put("top_k", as_integer("top_k", self.top_k, -1, hint="; 0 and -1 are off"))
        put("min_p", as_number("min_p", self.min_p, "in [0, 1]", lambda x: 0 <= x <= 1))
        if self.seed is not None:
            seed = as_integer("seed", self.seed, -(2**63), 2**64 - 1)
            put("seed", None if seed == -1 else seed)

    def _settle_lengths(self) -> None:
        put = partial(msgspec.structs.force_setattr, self)
        if self.max_tokens is not None:
            put("max_tokens", as_integer("max_tokens", self.max_tokens, 1, hint=", or None"))
        put("min_tokens", as_integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}; "
                "min_tokens must not be larger"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                put(name, 1 if value else None)
            elif value is not None:
                put(name, as_integer(name, value, -1, hint="; -1 is the whole vocabulary"))
        if self.prompt_logprobs is not None:
            # The model is not run where the cache answers, so nothing is known there.
            if self.skip_reading_prefix_cache is False:
                raise ValueError(
                    f"skip_reading_prefix_cache is False, prompt_logprobs is "
                    f"{self.prompt_logprobs}; log probabilities of the prompt need the whole "
                    "prompt computed, so leave skip_reading_prefix_cache out"
                )
            put("skip_reading_prefix_cache", True)

    def _settle_lists(self) -> None:
        put = partial(msgspec.structs.force_setattr, self)
        put("stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids))
        put("stop", as_strings("stop", self.stop))
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which every text contains; remove it")
        if self.stop and self.detokenize is False:
            raise ValueError(
                f"stop is {list(self.stop)!r} with detokenize=False; stop strings are looked "
                "for in the text, so detokenize must be True"
            )
        put("bad_words", as_strings("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", as_token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))

    def _settle_flags(self) -> None:
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                wrong_type(name, getattr(self, name), "True or False")
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            wrong_type(
                "skip_reading_prefix_cache", self.skip_reading_prefix_cache, "True, False or None"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            kind = _output_kind(self.output_kind)
            msgspec.structs.force_setattr(self, "output_kind", kind)

    def _settle_greedy(self) -> None:
        if self.n > 1:
            raise ValueError(
                f"n is {self.n} with temperature 0; greedy sampling has one continuation, "
                "so use n=1 or a temperature above 0"
            )
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            msgspec.structs.force_setattr(self, name, off)


def with_generation_config(
    params: SamplingParams,
    eos_token_id: int | None,
    generation_eos_ids: int | Sequence[int] | None,
) -> tuple[SamplingParams, frozenset[int]]:
    """Complete `params` with the ids that end a text for this model.

    eos_token_id        the tokenizer's, which ends a request without being a stop token
    generation_eos_ids  `eos_token_id` of the generation config
    returns             params whose stop_token_ids include the other EOS ids, unless
                        ignore_eos; and every stop id, which `min_tokens` bars
    """
    if generation_eos_ids is None:
        generation_eos_ids = ()
    elif isinstance(generation_eos_ids, int):
        generation_eos_ids = (generation_eos_ids,)
    others = [token for token in generation_eos_ids if token != eos_token_id]
    stop_ids = frozenset((*params.stop_token_ids, *others))
    if eos_token_id is not None:
        stop_ids |= {eos_token_id}
    missing = [token for token in dict.fromkeys(others) if token not in params.stop_token_ids]
    if missing and not params.ignore_eos:
        params = params.replace(stop_token_ids=(*params.stop_token_ids, *missing))
    return params, stop_ids


def check_for_model(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_logprobs: int = 20,
    stop_ids: frozenset[int] = frozenset(),
) -> None:
    """Refuse what this model cannot do, before it reaches the engine.

    vocab_size    ids from 0 to vocab_size - 1 have a logit
    max_logprobs  the most that logprobs and prompt_logprobs may ask for; -1: no limit
    stop_ids      as `with_generation_config` returned them
    raises        ValueError that names the parameter, the value and the limit
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise ValueError(
                    f"{name} has token id {token}, the model's largest is {vocab_size - 1}; "
                    "remove it"
                )
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        wanted = vocab_size if asked == -1 else asked
        if wanted is not None and 0 <= max_logprobs < wanted:
            meaning = f" (the whole vocabulary, {wanted} tokens)" if asked == -1 else ""
            raise ValueError(
                f"{name} is {asked}{meaning}, max_logprobs is {max_logprobs}; ask for fewer"
            )
    if "" in params.bad_words:
        raise ValueError("bad_words holds an empty string, which has no token; remove it")
    if params.allowed_token_ids is None:
        return
    if not params.allowed_token_ids:
        raise ValueError(
            "allowed_token_ids is empty, so no token could be sampled; give at least one id "
            "or leave it out"
        )
    if params.min_tokens and stop_ids.issuperset(params.allowed_token_ids):
        raise ValueError(
            f"allowed_token_ids is {list(params.allowed_token_ids)}, all of which end the text, "
            f"and min_tokens is {params.min_tokens}; allow another token or set min_tokens=0"
        )


def _known(given: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """`given` without what asks for nothing; TypeError for a name that is not in `fields`."""
    known = {}
    for name, value in given.items():
        if name in fields:
            known[name] = value
        elif name in _NOT_BUILT:
            nothing, advice = _NOT_BUILT[name]
            if value is not nothing:
                raise TypeError(f"{name} is {shown(value)}; lmscope does not take it: {advice}")
        else:
            raise TypeError(f"SamplingParams has no parameter {name}; {nearest(name, fields)}")
    return known


def _bias(value: Any) -> dict[int, float]:
    """A copy, so that what the caller does to theirs later changes nothing here."""
    if not isinstance(value, Mapping):
        wrong_type("logit_bias", value, "a mapping of token ids to numbers")
    bias = {}
    for token, number in value.items():
        # Ids are strings where the mapping comes from JSON.
        is_text = isinstance(token, str) and token.isdecimal()
        token = as_token_id("logit_bias", int(token) if is_text else token)
        bias[token] = as_number(f"logit_bias[{token}]", number, "finite")
    return bias


def _output_kind(value: object) -> RequestOutputKind:
    """The kind by its name, in any case."""
    names = [kind.name for kind in RequestOutputKind]
    if not isinstance(value, str):
        wrong_type("output_kind", value, f"a RequestOutputKind or its name: {', '.join(names)}")
    if value.upper() not in names:
        raise ValueError(f"output_kind is {shown(value)}; it must be one of {', '.join(names)}")
    return RequestOutputKind[value.upper()]
