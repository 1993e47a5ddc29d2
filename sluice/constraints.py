"""What an answer may be constrained to: JSON schemas and regular expressions, as llguidance grammars.

The gateway refuses what a worker could not enforce, so both read constraints here, with the same options and limits.
"""

import json
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from sluice.constraint_reasons import reason_for

JSON_SCHEMA_MAX_BYTES: Final = 64 << 10
REGEX_MAX_BYTES: Final = 8 << 10

LIMITS: Final = LLParserLimits(
    # Of the work for one token: about 20 ms. All rows of a worker wait meanwhile.
    step_lexer_fuel=20_000,
    initial_lexer_fuel=100_000,
    # About 2 kB each, for every row.
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

_JSON_OPTIONS: Final[Any] = {
    # Regular expressions. As most programs write JSON, with a blank or without; none elsewhere, since unsure models
    # would repeat blanks, and callers would pay for them.
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    # A keyword that cannot be enforced is an error, not ignored.
    "lenient": False,
}


GRAMMAR_MAX_BYTES: Final = 128 << 10
"""Largest grammar of tool calls, in bytes; one so long compiles in about a second."""
_MAX_BYTES: Final = {
    "json_schema": JSON_SCHEMA_MAX_BYTES,
    "regex": REGEX_MAX_BYTES,
    "grammar": GRAMMAR_MAX_BYTES,
}

_PATH_MAX_CHARS: Final = 200


class ConstraintInvalid(ValueError):
    """A constraint cannot be enforced; the message is the reason in one line."""


def json_grammar(schema: str) -> str:
    """Return the grammar of JSON texts that `schema` accepts.

    Raises:
        ConstraintInvalid: it is too long, no JSON object, or cannot be enforced.
    """
    _check_size(schema, JSON_SCHEMA_MAX_BYTES)
    # The schema that accepts everything, which the library takes as an object only.
    schema = "{}" if schema.strip() == "true" else schema
    if not schema.lstrip().startswith("{"):
        raise ConstraintInvalid("must be a JSON object")
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS))
    except ValueError as error:
        raise ConstraintInvalid(reason_for(str(error))) from error


def regex_grammar(regex: str) -> str:
    """Return the grammar of texts that `regex` matches from end to end.

    Raises:
        ConstraintInvalid: it is too long.
    """
    _check_size(regex, REGEX_MAX_BYTES)
    return str(LLMatcher.grammar_from_regex(regex))


def lark_grammar(grammar: str) -> str:
    """Return the grammar that `grammar` defines in llguidance's dialect of Lark.

    Raises:
        ConstraintInvalid: it is too long.
    """
    _check_size(grammar, GRAMMAR_MAX_BYTES)
    return str(LLMatcher.grammar_from_lark(grammar))


def json_in_lark(schema: Mapping[str, Any]) -> str:
    """Return the JSON texts that `schema` accepts, as a part of a grammar for `lark_grammar`."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of an answer.

    Raises:
        ConstraintInvalid: the grammar is wrong, or over the limits.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ConstraintInvalid(reason_for(matcher.get_error()))
    return matcher


def is_dead_end(matcher: LLMatcher) -> bool:
    """Return whether `matcher` failed because no token continues the text that it accepted."""
    return bool(matcher.get_error().startswith("NoExtension"))


def reason_of(matcher: LLMatcher) -> str:
    """Return why `matcher` failed, in one line."""
    return "no text matches it" if is_dead_end(matcher) else reason_for(matcher.get_error())


MULTIPLE_MAX: Final = 10_000
"""Largest `multipleOf`, also largest product of those that hold together: the automaton has a state a remainder."""


def problem_before(kind: str, text: str) -> str | None:
    """Return why `text` cannot be compiled, as far as that shows without compiling it; else None."""
    try:
        _check_size(text, _MAX_BYTES[kind])
        if kind == "json_schema":
            _check_multiples(_parsed(text), "$")
    except ConstraintInvalid as error:
        return str(error)
    except RecursionError:
        return "is nested too deeply; send fewer levels"
    return None


def _parsed(text: str) -> Any:
    """Return the value of the JSON `text`; raise ConstraintInvalid where it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"is not JSON at line {error.lineno}, column {error.colno}"
        raise ConstraintInvalid(problem) from None
    except ValueError:  # a number with more digits than Python reads
        raise ConstraintInvalid("has a number with too many digits") from None


def _check_multiples(part: Any, path: str) -> int:
    """Return the product of the multiples in `part`; raise ConstraintInvalid if it is too large."""
    if isinstance(part, list):
        for place, one in enumerate(part):
            _check_multiples(one, f"{path}[{place}]")
    if not isinstance(part, dict):
        return 1
    product = 1
    for name, value in part.items():
        below = f"{path}.{name}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "multipleOf" and is_number and 0 < value < math.inf:  # nor NaN
            product *= Fraction(str(value)).numerator
        elif name == "allOf" and isinstance(value, list):
            for place, one in enumerate(value):
                product *= _check_multiples(one, f"{below}[{place}]")
        else:
            _check_multiples(value, below)
        if product > MULTIPLE_MAX:
            raise ConstraintInvalid(
                f"{_label(below)}: what must be a multiple of over {MULTIPLE_MAX} cannot be enforced; check it yourself"
            )
    return product


def _label(path: str) -> str:
    """Shorten `path` for a message; names in it may have any length."""
    half = _PATH_MAX_CHARS // 2
    return path if len(path) <= _PATH_MAX_CHARS else f"{path[:half]}...{path[-half:]}"


def problem_of(kind: str, text: str) -> str | None:
    """Return why answers cannot be constrained to `text`, a "json_schema", "regex" or "grammar"; else None."""
    if (early := problem_before(kind, text)) is not None:
        return early
    try:
        return _problem_of(kind, text)
    except ConstraintInvalid as error:
        return str(error)


_GRAMMARS: Final[Mapping[str, Callable[[str], str]]] = {
    "json_schema": json_grammar,
    "regex": regex_grammar,
    "grammar": lark_grammar,
}


@lru_cache(maxsize=256)
def _problem_of(kind: str, text: str) -> str | None:
    """Compile and consume a first byte, which finds grammars that match nothing or are far too large."""
    matcher = compile_grammar(_GRAMMARS[kind](text), _bytes())
    mask = allocate_token_bitmask(1, _bytes().vocab_size)
    fill_next_token_bitmask(matcher, mask)
    matcher.try_consume_tokens(np.flatnonzero(_bits(mask[0]))[:1].tolist())
    return reason_of(matcher) if matcher.is_error() else None


def _bits(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return one number a token, 0 or 1, of a mask of llguidance."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")


@lru_cache
def _bytes() -> LLTokenizer:
    """Return a tokenizer with one token for each byte."""
    return LLTokenizer("byte")


def _check_size(text: str, limit: int) -> None:
    if len(text.encode()) > limit:
        raise ConstraintInvalid(f"must have at most {limit} bytes")
