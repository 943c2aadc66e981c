"""Checks of values that users give; the errors name parameter, value and limit."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

__all__ = [
    "MAX_INTEGER",
    "as_integer",
    "as_number",
    "as_strings",
    "as_token_id",
    "as_token_ids",
    "nearest",
    "shown",
    "wrong_type",
]


MAX_INTEGER = 2**63 - 1
"""The largest that a recording and a tensor can hold."""


def nearest(name: str, known: Sequence[str]) -> str:
    """What to say of an unknown name: the nearest known one, or all where none is near."""
    best = max(known, key=lambda other: _likeness(name, other))
    if _likeness(name, best) < 0.4:
        return f"it takes {', '.join(known)}"
    return f"did you mean {best}?"


def shown(value: object) -> str:
    """`value` as an error shows it: its repr, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def wrong_type(name: str, value: object, allowed: str) -> NoReturn:
    raise TypeError(f"{name} is {shown(value)}; it takes {allowed}")


def as_integer(name: str, value: object, low: int, high: int = MAX_INTEGER, hint: str = "") -> int:
    """`value` as a plain int; numpy's integers are taken too, True and 1.0 are not.

    `hint` follows the range in the message of the ValueError.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        wrong_type(name, value, "an integer")
    number = int(value)
    if not low <= number <= high:
        allowed = f"at least {low}" if number < low else f"at most {high}"
        raise ValueError(f"{name} is {shown(number)}; it must be {allowed}{hint}")
    return number


def as_number(
    name: str, value: object, allowed: str, is_allowed: Callable[[float], bool] = math.isfinite
) -> float:
    """`value` as a plain float; NaN and infinity are never allowed.

    `allowed` says in words what `is_allowed` tests.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond 1e308
        number = math.inf
    if not (math.isfinite(number) and is_allowed(number)):
        raise ValueError(f"{name} is {shown(value)}; it must be {allowed}")
    return number


def as_strings(name: str, value: Any) -> tuple[str, ...]:
    """A list of strings as a tuple; a string alone is a list of one, None is an empty one."""
    strings = []
    for item in _items(name, (value,) if isinstance(value, str) else value):
        if not isinstance(item, str):
            raise ValueError(f"{name} holds {shown(item)}; it takes strings")
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} holds {shown(item)}, which is no text: half a surrogate pair at "
                f"character {error.start}; remove it"
            ) from error
        strings.append(item)
    return tuple(strings)


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids as a tuple; None is an empty one."""
    return tuple(as_token_id(name, item) for item in _items(name, value))


def as_token_id(name: str, item: object) -> int:
    # A list of the right type with a wrong item is a wrong value, as in vLLM.
    if isinstance(item, numbers.Integral) and not isinstance(item, bool):
        token_id = int(item)
        if 0 <= token_id <= MAX_INTEGER:
            return token_id
    raise ValueError(f"{name} holds {shown(item)}; it takes token ids, integers from 0")


def _likeness(name: str, other: str) -> float:
    """How alike two names are, 0 to 1; the beginning of a name, such as `temp`, is much alike."""
    ratio = difflib.SequenceMatcher(None, name, other).ratio()
    is_beginning = len(other) > 2 and (name.startswith(other) or other.startswith(name))
    return max(ratio, 0.7) if is_beginning else ratio


def _items(name: str, value: Any) -> Iterable[object]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        wrong_type(name, value, "a list")
    return value
