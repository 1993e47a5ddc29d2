"""Checks sums in a text: finds, evaluates and compares them with the stated results, as in "3 boxes x 4 = 12".

The grammar is numbers, + - * / x × ÷ and brackets; thousands separators, currency and percent signs are read, units and
remarks behind a number are skipped, and a = b = c is two sums. Work is bounded: an expression of more than
`EXPRESSION_CHARS_MAX` characters is left out.
"""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

EXPRESSION_CHARS_MAX: Final = 80
"""Longest expression that is evaluated, in characters."""
SUMS_MAX: Final = 40
"""Sums of one text that are read."""
_VALUE_MAX: Final = 1e15
"""Results from here on count as no number."""
_TOLERANCE: Final = 0.0051
"""Difference that counts as rounding to cents: half a cent, and a little for binary fractions."""
_PERCENT_TOLERANCE: Final = 0.5
"""Difference that counts as rounding of a percentage."""

_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+", re.ASCII)
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
_EXPRESSION: Final = re.compile(r"[\d\s+\-*/().]+", re.ASCII)
_PERCENT: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%", re.ASCII)
_SPELLED: Final = str.maketrans({"×": "*", "x": "*", "÷": "/", "$": None, ",": None})
_PLAIN: Final = str.maketrans({"\\": None, "≈": "=", "−": "-", "–": "-"})
_OPERATORS: Final = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Sum:
    """An expression and its result as stated."""

    operands: tuple[float, ...]
    operators: str
    """The characters + - * / in order."""
    value: float | None
    """Its result as computed; None where it cannot be."""
    stated: float

    @property
    def is_wrong(self) -> bool:
        """Whether the stated result differs from the computed one; 11 / 30 may be 37 (percent), 3 * 2 (cents) 0.06."""
        if self.value is None:
            return False
        right = abs(self.value - self.stated) <= max(_TOLERANCE, abs(self.stated) * 1e-3)
        percent = abs(100 * self.value - self.stated) <= _PERCENT_TOLERANCE
        return not (right or percent or abs(self.value / 100 - self.stated) < 1e-6)


def numbers(text: str) -> list[float]:
    """Return the numbers in `text`, without signs."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def sums(text: str) -> list[Sum]:
    """Return the sums in `text`, in order."""
    result: list[Sum] = []
    for line in text.translate(_PLAIN).splitlines():
        if len(result) < SUMS_MAX and "=" in line:
            result += _of_line(_UNITS.sub(" ", _REMARK.sub("", _ITEM.sub("", line))))
    return result[:SUMS_MAX]


def evaluate(expression: str) -> float | None:
    """Return the value of `expression`, or None if it has none."""
    plain = _PERCENT.sub(r"(\1/100)", expression.translate(_SPELLED).strip())
    if len(expression) > EXPRESSION_CHARS_MAX or not _EXPRESSION.fullmatch(plain):
        return None
    try:
        value = _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError):
        return None
    return value if abs(value) < _VALUE_MAX else None


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return float(_OPERATORS[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError("neither a number nor an operation")


def _of_line(line: str) -> Iterator[Sum]:
    """Yield the sums of a line; of a = b = c each pair of neighbours."""
    for left, right in islice(pairwise(line.split("=")), SUMS_MAX):
        tail = _BREAK.split(_LEFT.findall(left.rstrip()[-EXPRESSION_CHARS_MAX - 1 :])[0])[-1]
        if len(tail) > EXPRESSION_CHARS_MAX:
            continue  # its beginning may be cut off, and the rest has another value
        expression = tail.lstrip(" .,)").rstrip(" .,")
        spelled = expression.translate(_SPELLED)
        stated = _stated(right)
        # What begins with an operator is the rest of an expression that is not all numbers.
        if stated is None or not _OPERATION.search(spelled) or spelled[0] in "+-*/":
            continue
        operators = "".join(mark for mark in spelled if mark in "+-*/")
        yield Sum(tuple(numbers(spelled)), operators, evaluate(expression), stated)


def _stated(text: str) -> float | None:
    """Return the value of the expression or number that `text` begins with."""
    match = _RIGHT.match(text)
    if match is None or len(match[1]) > EXPRESSION_CHARS_MAX:
        return None  # no number, or a part of one
    stated = match[1].rstrip(" .,(").translate(_SPELLED)
    value = evaluate(stated) if _OPERATION.search(stated) else None
    if value is None:
        values = numbers(stated)
        if values:
            value = -values[0] if stated.startswith("-") else values[0]
    return value
