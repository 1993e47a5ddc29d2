"""Verifies answers to prompts that ask to sort or to add up a list of numbers.

Only prompts whose numbers are one list count ("Sort 31, 7 and 19", "What is the total of 4, 8, 15?"): with other
numbers the task is ambiguous. A misread prompt costs one answer of the large model.
"""

import re
from typing import Final

from gateway.routing.learned.arithmetic import numbers

READ_CHARS_MAX: Final = 4_096
"""Longer prompts and answers are not checked."""

_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_LIST: Final = re.compile(
    r"(?<![\w.-])\d+(?:\.\d+)?(?:(?:\s*[,;]\s*(?:and\s+)?|\s+and\s+)\d+(?:\.\d+)?)+", re.ASCII
)
_THOUSANDS: Final = re.compile(r"\d,\d{3}(?!\d)", re.ASCII)
"""May be one number or two."""
_SORT: Final = re.compile(r"\b(?:sort|arrange|ascending|descending)", re.I)
_PUT: Final = re.compile(r"\b(?:put|order)\b", re.I)
_IN_ORDER: Final = re.compile(
    r"\b(?:small|low|larg|bigg|great|high)(?:est|er)?\b|\b(?:rising|falling|increasing|decreasing)\b",
    re.I,
)
_FALLING: Final = re.compile(
    r"\b(?:descending|falling|decreasing)\b|\b(?:larg|bigg|great|high)(?:est|er)?\s+(?:first|to)\b"
    r"|\b(?:small|low)(?:est|er)?\s+last\b",
    re.I,
)
_ADD: Final = re.compile(r"\b(?:total|sum|add)\b", re.I)


def is_as_asked(prompt: str, answer: str) -> bool | None:
    """Whether ``answer`` sorts or adds up the numbers of ``prompt``; None where the prompt asks for neither.

    A list must have the same numbers in the order that was asked for, rising unless the prompt says otherwise. A total
    must be the last number of the answer.
    """
    asked = _only_list(prompt)
    if asked is None:
        return None
    sorts, adds = _asks_to_sort(prompt), _ADD.search(prompt) is not None
    if sorts == adds:
        return None
    if sorts:
        return sorted(asked, reverse=_FALLING.search(prompt) is not None) == _only_list(answer)
    found = numbers(answer[-READ_CHARS_MAX:])
    return bool(found) and abs(found[-1] - sum(asked)) < 1e-6


def _asks_to_sort(prompt: str) -> bool:
    if _SORT.search(prompt):
        return True
    return _PUT.search(prompt) is not None and _IN_ORDER.search(prompt) is not None


def _only_list(text: str) -> list[float] | None:
    """The numbers of ``text`` when they are one list of two or more."""
    if len(text) > READ_CHARS_MAX or _THOUSANDS.search(text):
        return None
    lists = _LIST.findall(text)
    if len(lists) != 1:
        return None
    found = _NUMBER.findall(lists[0])
    return [float(number) for number in found] if len(_NUMBER.findall(text)) == len(found) else None
