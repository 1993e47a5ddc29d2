"""Patterns of an operator, matched in linear time whatever the text."""

from typing import Any

import re2


class PatternError(ValueError):
    """The pattern cannot be used."""


def compile_pattern(pattern: str) -> Any:
    """The pattern, ignoring case, ready to search.

    Raises:
        PatternError: it is not one.
    """
    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0] if error.args else ""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise PatternError(f"is no pattern: {text}") from None
