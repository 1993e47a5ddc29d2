"""What the router knows about a request."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# 1,250.50 is one number; 3,4,5 are three.
_NUMBER: Final = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Governed:
    """The safety policy says who answers."""

    model: str
    rule: str
    """What was found."""


@dataclass(frozen=True)
class Features:
    """Facts that routing rules may ask for."""

    model: str | None
    """The model that the caller named; None for "auto"."""
    numbers: int = 0
    """Numbers in the caller's turns."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens of the default model; 0 where no rule asks."""
    labels: Mapping[str, str] = field(default_factory=dict)
    governed: Governed | None = None


def count_numbers(text: str) -> int:
    """How many numbers ``text`` holds."""
    return sum(1 for _ in _NUMBER.finditer(text))
