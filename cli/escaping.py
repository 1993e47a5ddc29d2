"""Text that others wrote, such as names of jobs and reasons of refusals, on the terminal of an operator."""

import re
from typing import Final

_UNSAFE: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)
"""What steers a terminal or changes the order of what it shows: control characters, and those of bidi."""


def printable(text: str) -> str:
    """Escape characters that steer a terminal, as JSON does; ends of lines and tabs stay."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
