"""What can be verified about an answer without a model: its sums, its JSON."""

import json
import re
from decimal import Decimal, DivisionByZero, InvalidOperation
from typing import Final

_NUMBER: Final = r"-?\$?\d[\d,]*(?:\.\d+)?%?"
_EQUATION: Final = re.compile(
    rf"(?P<left>{_NUMBER}(?:\s*[-+*/x×÷]\s*{_NUMBER}){{1,12}})\s*=\s*(?P<right>{_NUMBER})(?!\s*[-+*/x×÷=]\s*\d)"
)


def wrong_sum(text: str) -> str | None:
    """The first equation in ``text`` that does not hold, such as "2 + 2 = 5"; None when all that can be read hold.

    Numbers may have separators of thousands, a currency sign and decimals. Where decimals or a division are in play,
    rounding to the last digit that is shown is no fault.
    """
    for found in _EQUATION.finditer(text):
        if "%" in found[0]:
            continue  # what a percentage is of is not said
        left = _value(found["left"])
        if left is None:
            continue
        right = _number(found["right"])
        if abs(left - right) > _rounding(found["left"], right):
            return found[0]
    return None


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _rounding(left: str, right: Decimal) -> Decimal:
    if not any(sign in left for sign in "./÷"):
        return Decimal(0)
    exponent = right.as_tuple().exponent
    assert isinstance(exponent, int), "a number that was read is finite"
    return Decimal(1).scaleb(exponent)


def _value(expression: str) -> Decimal | None:
    """With the usual precedence: products and quotients first, from left to right. None for a division by zero."""
    tokens = _tokens(expression)
    total, sign, term = Decimal(0), 1, tokens[0]
    assert isinstance(term, Decimal), "an expression begins with a number"
    for operator, number in zip(tokens[1::2], tokens[2::2], strict=True):
        assert isinstance(number, Decimal), "numbers and operators take turns"
        if operator in ("+", "-"):
            total, sign, term = total + sign * term, 1 if operator == "+" else -1, number
        elif operator in ("/", "÷"):
            try:
                term /= number
            except (DivisionByZero, InvalidOperation):
                return None
        else:
            term *= number
    return total + sign * term


def _tokens(expression: str) -> list[Decimal | str]:
    """Numbers and operators in turns; a minus behind a number is an operator, whatever stands behind it."""
    tokens: list[Decimal | str] = []
    position = 0
    while position < len(expression):
        numeric = not tokens or isinstance(tokens[-1], str)
        pattern = _SIGNED if numeric else _OPERATOR
        found = pattern.match(expression, position)
        assert found is not None, expression
        tokens.append(_number(found[1]) if numeric else found[1])
        position = found.end()
    return tokens


_SIGNED: Final = re.compile(rf"\s*({_NUMBER})\s*")
_OPERATOR: Final = re.compile(r"\s*([-+*/x×÷])\s*")


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
