"""Sums in a text: "3 boxes x 4 = 12" is found, worked out and compared with what the text says.

The grammar is numbers, + - * / x × ÷ and brackets; thousands separators, currency and percent signs are read, units and
remarks behind a number are passed over, and a = b = c is two sums. Work is bounded: an expression of more than
`EXPRESSION_CHARS_MAX` characters is left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from math import copysign
from operator import itemgetter
from typing import Final

EXPRESSION_CHARS_MAX: Final = 80
SUMS_MAX: Final = 40
"""Sums of one text that are looked at."""
_TOLERANCE: Final = 0.0051
"""Answers round to cents."""
_PERCENT_TOLERANCE: Final = 0.5
_SMALL: Final = 1e-6

_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+", re.ASCII)
_MARK: Final = re.compile(r"<<([^<>]{1,160})>>")
_MARKS: Final = re.compile(r"<<[^<>]*>>")
_REMARK: Final = re.compile(r"(?<=[\d%])[ ]?\([^()=]{0,60}[A-Za-z][^()=]{0,60}\)")
"""40 (from the first day) + 10."""
_UNIT: Final = r"(?!x\b)(?:[A-Za-z][\w'’]{1,19}|\")"
_UNITS: Final = re.compile(rf"(?<=[\d%])[ ]?{_UNIT}(?:[ /]{_UNIT}){{0,3}}[ ]?(?=[-+*/x×÷=)])")
"""5 classes * 15 students = 75. A single letter is no unit: in 3x = 12 it is an unknown."""
_ITEM: Final = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+")
"""The mark of an item in a list."""
_LEFT: Final = re.compile(r"[\d\s+\-*/x×÷().,$%]*$", re.ASCII)
_BREAK: Final = re.compile(r"[.,] ")
_RIGHT: Final = re.compile(r"\s*(-?\s?[(\d.$][\d\s+\-*/x×÷().,$%]{0,80})", re.ASCII)
_OPERATION: Final = re.compile(r"[\d)%]\s*[-+*/]\s*[(\d.$]", re.ASCII)
_TOKEN: Final = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()%]))", re.ASCII)
_SPELLED: Final = str.maketrans({"×": "*", "x": "*", "÷": "/", "$": None, ",": None})
_PLAIN: Final = str.maketrans({"\\": None, "≈": "=", "−": "-", "–": "-"})


@dataclass(frozen=True, slots=True)
class Sum:
    """An expression and what the text says it is."""

    operands: tuple[float, ...]
    operators: str
    """The characters + - * / in order."""
    value: float | None
    """What it is; None where it cannot be worked out."""
    stated: float

    @property
    def wrong(self) -> bool:
        """Whether it does not add up."""
        if self.value is None:
            return False
        off = abs(self.value - self.stated)
        return off > max(_TOLERANCE, abs(self.stated) * 1e-3) and not self._scaled

    @property
    def _scaled(self) -> bool:
        """Whether 11 / 30 is said to be 37 (percent), or 3 * 2 (cents) to be 0.06."""
        assert self.value is not None
        percent = abs(100 * self.value - self.stated) <= _PERCENT_TOLERANCE
        return percent or abs(self.value / 100 - self.stated) < _SMALL


def numbers(text: str) -> list[float]:
    """The numbers in ``text``, without signs."""
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def sums(text: str) -> list[Sum]:
    """The sums in ``text``, in order: those marked <<a=b>> and those written out; one that is both counts once."""
    found: list[Sum] = []
    for line in text.translate(_PLAIN).splitlines():
        if len(found) < SUMS_MAX and "=" in line:
            found += _of_line(_UNITS.sub(" ", _REMARK.sub("", _ITEM.sub("", line))))
    return found[:SUMS_MAX]


def unmarked(text: str) -> str:
    """``text`` without its marked sums."""
    return _MARKS.sub("", text)


def evaluate(expression: str) -> float | None:
    """The value of ``expression``, or None where it is none."""
    plain = expression.translate(_SPELLED).strip()
    if len(plain) > EXPRESSION_CHARS_MAX:
        return None
    tokens, at = [], 0
    while at < len(plain):
        match = _TOKEN.match(plain, at)
        if match is None:
            return None
        tokens.append(match[1] or match[2])
        at = match.end()
    try:
        parser = _Parser(tokens)
        value = parser.sum()
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    return value if parser.at == len(tokens) and abs(value) < 1e15 else None


def _of_line(line: str) -> list[Sum]:
    """The sums of one line, by where they stand."""
    pieces = _MARK.split(line)
    ends = accumulate(map(len, pieces[::2]))
    plain = "".join(pieces[::2])
    marked = [
        (end, _as_written(each, plain[end:]))
        for end, inside in zip(ends, pieces[1::2], strict=False)
        for _, each in _chain(inside)
    ]
    written = [
        (place, each)
        for place, each in _chain(plain)
        if not any(_same(plain[place:end], each, told) for end, told in marked if end >= place)
    ]
    return [each for _, each in sorted(marked + written, key=itemgetter(0))]


def _same(between: str, written: Sum, marked: Sum) -> bool:
    """Whether a mark right behind an equals sign says what is written: 4 boxes * 3 = <<4*3=12>>12."""
    return not between.strip(" $") and written.stated == marked.stated


def _as_written(found: Sum, behind: str) -> Sum:
    """A marked sum with the number that stands ``behind`` the mark, which is what the reader gets."""
    written = _NUMBER.match(behind)
    if written is None:
        return found
    return replace(found, stated=copysign(float(written[0].replace(",", "")), found.stated))


def _chain(text: str) -> Iterator[tuple[int, Sum]]:
    """Of a = b = c each pair of neighbours, and where its equals sign ends."""
    place = 0
    for left, right in islice(pairwise(text.split("=")), SUMS_MAX):
        place += len(left) + 1
        tail = _BREAK.split(_LEFT.findall(left[-EXPRESSION_CHARS_MAX:])[0])[-1]
        expression = tail.lstrip(" .,)").rstrip(" .,")
        spelled = expression.translate(_SPELLED)
        stated = _stated(right)
        # What begins with an operator is the rest of something that is not all numbers.
        if stated is None or not _OPERATION.search(spelled) or spelled[0] in "+-*/":
            continue
        operators = "".join(mark for mark in spelled if mark in "+-*/")
        yield place, Sum(tuple(numbers(spelled)), operators, evaluate(expression), stated)


def _stated(text: str) -> float | None:
    """The value of what ``text`` begins with, an expression or a number."""
    match = _RIGHT.match(text)
    if match is None:
        return None
    said = match[1].rstrip(" .,(").translate(_SPELLED)
    value = evaluate(said) if _OPERATION.search(said) else None
    if value is None:
        known = numbers(said)
        value = (-known[0] if said.startswith("-") else known[0]) if known else None
    return value


class _Parser:
    """Recursive descent over tokens; depth is bounded by the length of the expression."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def sum(self) -> float:
        value = self._product()
        while self._next() in ("+", "-"):
            value += self._product() if self._take() == "+" else -self._product()
        return value

    def _product(self) -> float:
        value = self._factor()
        while self._next() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor()
            else:
                value /= self._factor()
        return value

    def _factor(self) -> float:
        token = self._take()
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise ValueError("bracket")
        else:
            value = float(token)
        if self._next() == "%":
            self._take()
            value /= 100
        return value

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        token = self.tokens[self.at]
        self.at += 1
        return token
