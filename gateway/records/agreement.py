"""Measure how far two answers to one prompt agree; docs/concepts/routing.md has examples.

The first rule that applies to both answers decides:

1. The texts are equal except for case, white space and punctuation at the ends: 1.
2. Both state a final number: 1 if it is the same, else 0.
3. Both state a final choice, such as "B": 1 if it is the same, else 0.
4. The F1 score of their words, as in SQuAD (Rajpurkar et al. 2016).
"""

import re
from collections import Counter
from typing import Final

from gateway.routing.learned.features import ends

READ_CHARS_MAX: Final = 16_384
"""Most characters of an answer that are compared; of a longer one its two ends."""

_NUMBER: Final = r"-?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_MARKED: Final = re.compile(
    rf"(?:####|\\boxed\{{|\b(?:answer|total|result)\b(?: is)?[ \t]{{0,4}}:?)"
    rf"[ \t]{{0,4}}({_NUMBER})(?![\d,]*\d)",
    re.I,
)
_LAST_LINE: Final = re.compile(rf"(?:.*(?::\s+|=\s*))?({_NUMBER})\s*(?:%|[^\W\d_]{{1,12}})?[.!]?")
_CHOICE: Final = re.compile(
    r"(?:.*\b(?:answer|choice|option)\b(?: is)?\s*:?\s*)?\(?([A-E])\)?[.!]?", re.I
)
_LEADING_CHOICE: Final = re.compile(r"\(?([A-E])[.):]\s")
_WORD: Final = re.compile(r"\w+(?:[.,]\d+)*")
_EDGES: Final = " \t\n\r.,;:!?\"'`*"
_LINE_CHARS_MAX: Final = 200
_TOLERANCE: Final = 1e-6


def agreement(first: str, second: str) -> float:
    """Return the agreement of two answers, from 0 for nothing in common to 1 for the same answer."""
    first, second = ends(first, READ_CHARS_MAX).strip(), ends(second, READ_CHARS_MAX).strip()
    if _plain(first) == _plain(second):
        return 1.0
    numbers = final_number(first), final_number(second)
    # A number counts as a whole: 41 and 42 share no part.
    if numbers[0] is not None and numbers[1] is not None:
        return float(abs(numbers[0] - numbers[1]) <= _TOLERANCE * max(1.0, abs(numbers[0])))
    choices = final_choice(first), final_choice(second)
    if choices[0] and choices[1]:
        return float(choices[0] == choices[1])
    return _f1(Counter(_WORD.findall(first.lower())), Counter(_WORD.findall(second.lower())))


def final_number(text: str) -> float | None:
    """Return the final number: marked as the answer, or alone on the last line, or after ":" or "=" there."""
    if text.startswith(("{", "[", "```")):  # the last value of JSON or code is not a result
        return None
    marked = _MARKED.findall(text)
    number = marked[-1] if marked else None
    if number is None:
        line = _LAST_LINE.fullmatch(_last_line(text))
        number = line[1] if line else None
    return None if number is None else float(re.sub("[$€£,]", "", number))


def final_choice(text: str) -> str:
    """Return the chosen letter: at the beginning, or on the last line alone or after "answer" or the like; or ""."""
    leading = _LEADING_CHOICE.match(text)
    if leading:
        return leading[1]
    line = _CHOICE.fullmatch(_last_line(text))
    return line[1].upper() if line else ""


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(_EDGES)


def _last_line(text: str) -> str:
    """Return the end of the last line; it is cut, because the patterns take time quadratic in its white space."""
    return text.rpartition("\n")[2][-_LINE_CHARS_MAX:].strip(" \t*`}")


def _f1(first: Counter[str], second: Counter[str]) -> float:
    common = (first & second).total()
    return 2 * common / (first.total() + second.total()) if common else 0.0
