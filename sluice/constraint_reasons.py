"""Say in our own words why a constraint cannot be enforced; llguidance's words are about its inside."""

import re
from collections.abc import Sequence
from typing import Final

SIMPLER: Final = "make it simpler: fewer and smaller counted repetitions, alternatives, multiples, parts of allOf"
"""What to do about a constraint that is over the limits."""
TOO_COMPLEX: Final = f"is too complex; {SIMPLER}"
_REASONS: Final[Sequence[tuple[re.Pattern[str], str]]] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (
            r"^Unimplemented keys: \[(.*)\]",
            r"has keywords that cannot be enforced: \1; leave them out",
        ),
        (r"^Pointer '(.*)' does not exist", r"$ref: there is nothing at \1; correct it"),
        (r"^Resource '(.*)' is not present", r"$ref: \1 is not fetched; put its schema into $defs"),
        (r"invalid multiple of|multipleOf", "multipleOf must be a number above 0"),
        (r"recursion limit", "is nested too deeply; send fewer levels"),
        (r"at line (\d+) column (\d+)", r"is not JSON at line \1, column \2"),
        (r"^Unknown format: (.*)", r"the format \1 is unknown; leave it out"),
        (r"^Unsatisfiable schema: (.*)", r"no value satisfies it: \1; correct it"),
        (r"^Invalid type: (.*)", r"type must be one of JSON's, and is \1"),
        (r"^(Expected .* for '.*'|[A-Za-z$]+ must be an? [a-z ]+)", r"is no valid JSON Schema: \1"),
        (
            r"look-?arounds?\b|look-ahead",
            "look-around and word boundaries are not supported; write it without",
        ),
        (r"backreferences", "back references are not supported; write it without"),
        (
            r"^((?:unclosed|unopened|unrecognized|invalid|repetition|Unicode|incomplete|duplicate|empty) .*)",
            r"is no valid regular expression: \1",
        ),
        (r"lexer|fuel|too (?:many|large|big|complex)|limit", TOO_COMPLEX),
    )
)
"""Patterns in a message of the library, and what callers are told. The first that fits counts."""
_UNKNOWN: Final = "cannot be enforced; write it in another way"
_REASON_CHARS_MAX: Final = 300


def reason_for(message: str) -> str:
    """Return the reason that a `message` of llguidance stands for, in one line.

    For a regular expression the message also draws the place.
    """
    line = (message.partition("\nerror: ")[2] or message).split("\n")[0]
    line = line.replace("<non-verbose/>", "").strip()
    for pattern, reason in _REASONS:
        if match := pattern.search(line):
            return match.expand(reason)[:_REASON_CHARS_MAX]
    return _UNKNOWN
