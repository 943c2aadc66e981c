"""SamplingParams: how a request is sampled and when it ends, with vLLM's names and rules."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["RequestOutputKind", "SamplingParams"]

logger = logging.getLogger(__name__)

_MIN_TEMPERATURE = 0.01


class RequestOutputKind(enum.IntEnum):
    """What a caller receives: all so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True
):
    """How one request is sampled and when it ends.

    Frozen, so an engine never changes what a caller holds; `params.replace(seed=1)` makes
    a changed copy. A value that is out of range raises ValueError, one of the wrong type
    TypeError; both name the field, the value and what is allowed. Defaults, ranges and the
    order of checks are vLLM's (SamplingParams, 0.16).

    n                   continuations of the prompt
    temperature         0 is greedy; above 0 and below 0.01 becomes 0.01, with a warning
    top_k               0 and -1: off
    seed                -1 and None: no seed of its own
    stop                strings that end the text; cut off unless include_stop_str_in_output
    max_tokens          None: as many as max_model_len leaves room for
    min_tokens          until then neither EOS nor stop tokens can be sampled
    logprobs            log probabilities per token: k of the most likely beside the chosen
                        one; True is 1; -1 is the whole vocabulary
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

    def __post_init__(self) -> None:
        self._normalise()
        self._check()

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked like a new one."""
        return msgspec.structs.replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _normalise(self) -> None:
        """Bring shorthand into the one form that the rest of lmscope sees."""
        put = msgspec.structs.force_setattr
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            put(self, name, _as_tuple(name, getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                put(self, name, 1)
        if self.seed == -1:
            put(self, "seed", None)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
                     "top_p", "min_p"):
            _require_number(name, getattr(self, name))
            put(self, name, float(getattr(self, name)))
        if 0 < self.temperature < _MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is below %g and was raised to it: smaller values lose all "
                "precision; use 0 for greedy", self.temperature, _MIN_TEMPERATURE,
            )
            put(self, "temperature", _MIN_TEMPERATURE)
        if self.temperature == 0.0:
            put(self, "top_p", self._checked_top_p())
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is None:
            # Their hidden states are missing where the cache answers.
            put(self, "skip_reading_prefix_cache", True)

    def _checked_top_p(self) -> float:
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        return self.top_p

    def _check(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _require_int(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name))
        for name in ("ignore_eos", "detokenize", "skip_special_tokens",
                     "spaces_between_special_tokens", "include_stop_str_in_output"):
            _require_bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            _require_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)

        _require("n", self.n, self.n >= 1, "at least 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, -2 <= value <= 2, "in [-2, 2]")
        _require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0,
                 "above 0")
        _require("temperature", self.temperature, self.temperature >= 0, "at least 0")
        self._checked_top_p()
        _require("top_k", self.top_k, self.top_k >= -1, "0 or -1 for off, else at least 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        if self.seed is not None:
            _require("seed", self.seed, -(2**63) <= self.seed < 2**64, "a 64-bit integer")
        if self.max_tokens is not None:
            _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1, or None")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}; "
                "min_tokens must not be larger"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require(name, value, value >= -1, "at least 0, or -1 for the whole vocabulary")
        if self.is_greedy and self.n > 1:
            raise ValueError(
                f"n is {self.n} with temperature 0; greedy sampling gives one continuation, "
                "so use n=1 or a temperature above 0"
            )
        self._check_collections()

    def _check_collections(self) -> None:
        for name, kind in (("stop", str), ("bad_words", str)):
            for item in getattr(self, name):
                if not isinstance(item, kind):
                    raise TypeError(f"{name} holds {item!r}; it takes strings")
                if not item:
                    raise ValueError(f"{name} holds an empty string, which matches everywhere")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for item in getattr(self, name) or ():
                _require_int(name, item)
                _require(name, item, item >= 0, "token ids, at least 0")
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop is {list(self.stop)!r} with detokenize=False; stop strings are looked "
                "for in the text, so detokenize must be True"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty; no token could be sampled")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias is {self.logit_bias!r}; it takes {{token id: bias}}")
            for token, bias in self.logit_bias.items():
                _require_int("logit_bias", token)
                _require_number("logit_bias", bias)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind is {self.output_kind!r}; it takes a RequestOutputKind")


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise TypeError(f"{name} is {value!r}; it takes a list")
    return tuple(value)


def _require(name: str, value: object, is_good: bool, allowed: str) -> None:
    if not is_good:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it takes an integer")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it takes True or False")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it takes a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be finite")
