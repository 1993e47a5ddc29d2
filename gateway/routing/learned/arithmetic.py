"""Sums in a text: "3 x 4 = 12" is found, worked out and compared with what the text says.

The grammar is numbers, + - * / x × ÷ and brackets; thousands separators, currency signs and percent signs are read.
Work is bounded: an expression of more than `EXPRESSION_CHARS_MAX` characters is left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

EXPRESSION_CHARS_MAX: Final = 80
SUMS_MAX: Final = 40
"""Sums of one text that are looked at."""
_TOLERANCE: Final = 0.0051
"""Answers round to cents."""

_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+", re.ASCII)
_MARKED: Final = re.compile(r"<<([^<>=]{1,80})=([^<>=]{1,40})>>")
_MARKS: Final = re.compile(r"<<[^<>]*>>")
_PLAIN: Final = re.compile(
    r"([(\d.$][\d\s+\-*/x×÷().,$%\\]{0,80}?)=\s*\$?\s*(-?[\d,]*\.?\d+)", re.ASCII
)
_OPERATION: Final = re.compile(r"[\d)%]\s*[-+*/]\s*[(\d.$]", re.ASCII)
_TOKEN: Final = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()%]))", re.ASCII)
_SPELLED: Final = str.maketrans({"×": "*", "x": "*", "÷": "/", "$": None, ",": None, "\\": None})


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
        return self.value is not None and abs(self.value - self.stated) > max(
            _TOLERANCE, abs(self.stated) * 1e-3
        )


def numbers(text: str) -> list[float]:
    """The numbers in ``text``, without signs."""
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def sums(text: str) -> list[Sum]:
    """The sums in ``text``, in order of kind: those marked <<a=b>> or, where none is marked, those written out."""
    found = list(_read(_MARKED.findall(text)))
    return found or list(_read(_PLAIN.findall(text)))


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


def _read(pairs: list[tuple[str, str]]) -> Iterator[Sum]:
    for expression, stated in pairs[:SUMS_MAX]:
        spelled = expression.translate(_SPELLED)
        value = numbers(stated)
        if not value or not _OPERATION.search(spelled):
            continue
        operators = "".join(mark for mark in spelled.strip() if mark in "+-*/")
        sign = -1.0 if stated.lstrip(" $").startswith("-") else 1.0
        yield Sum(tuple(numbers(spelled)), operators, evaluate(expression), sign * value[0])


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
