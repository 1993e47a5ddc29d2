"""What is read of a prompt: its words, numbers, options and bytes.

Reading is bounded: of a long prompt the head and the tail are read, so a decision costs the same for 2 kB and 2 MB.
"""

import re
from dataclasses import dataclass
from typing import Final

READ_CHARS_MAX: Final = 1_200
"""Of a longer prompt the first and the last half of this many characters are read."""

_TOKEN: Final = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|[0-9]+(?:[.,][0-9]+)*")
_OPTION: Final = re.compile(r"^\(?[A-Ea-e1-9][.)][ \t]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, taken apart once for everything that looks at it."""

    read: str
    """What is read of it."""
    chars: int
    """Length of the whole prompt."""
    tokens: list[str]
    """Words and numbers in lower case, in order."""
    distinct: frozenset[str]
    """The tokens without order."""
    stem: str
    """What stands before the options; everything when there are none."""
    options: list[str]


def parse(prompt: str) -> Text:
    """Takes ``prompt`` apart."""
    read = ends(prompt, READ_CHARS_MAX)
    starts = [match.start() for match in _OPTION.finditer(read)]
    stops = [*starts[1:], len(read)] if starts else []
    options = [read[start:end].partition("\n")[0] for start, end in zip(starts, stops, strict=True)]
    stem = read[: starts[0]] if starts else read
    tokens = _TOKEN.findall(read.lower())
    return Text(read, len(prompt), tokens, frozenset(tokens), stem, options)


def ends(text: str, chars_max: int) -> str:
    """``text``, or its head and tail on two lines where it is longer than ``chars_max``."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n{text[-half:]}"
