"""Enums of the public API as words: `ROUTE_STRATEGY_RULES` is "rules"."""

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

V = TypeVar("V", bound=int)

UNKNOWN = "unknown"
"""A value of a newer release."""


@lru_cache(1024)
def word_of(enum: Any, value: int) -> str:
    """Return the word of `value` of the generated `enum`; `UNKNOWN` for an unknown number."""
    named = enum.DESCRIPTOR.values_by_number.get(value)
    return UNKNOWN if named is None else named.name.removeprefix(_prefix(enum)).lower()


def value_of(enum: "_EnumTypeWrapper[V]", word: str) -> V:
    """Return the value that `word` names; raise ValueError for another word."""
    value: V = _value(enum, word)
    return value


@cache  # of words that name a value: their number is that of the protos
def _value(enum: "_EnumTypeWrapper[V]", word: str) -> V:
    return enum.Value(_prefix(enum) + word.upper())


def _prefix(enum: Any) -> str:
    """Return the prefix of all values: by Protobuf's style guide the enum's name; number 0 is unspecified."""
    name: str = enum.DESCRIPTOR.values_by_number[0].name
    return name.removesuffix("UNSPECIFIED")
