"""What can be verified about an answer without a model: its sums, its JSON."""

import json

from gateway.routing.learned.arithmetic import Sum, sums


def has_wrong_sum(text: str) -> bool:
    """Whether an equation in ``text`` does not hold, such as "2 + 2 = 5"; what cannot be worked out is no fault.

    Whole numbers must agree exactly; where decimals or a division are in play, rounding is no fault.
    """
    return any(_wrong(one) for one in sums(text))


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _wrong(one: Sum) -> bool:
    whole = "/" not in one.operators and all(number.is_integer() for number in one.operands)
    return one.value is not None and one.value != one.stated if whole else one.wrong
