"""Checks of a cascade's first answer that need no model. A policy names them: ``checks: [finished, json, sums]``.

To add a check, write a function of `WholeAnswer` and enter it into `CHECKS` under its name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.routing.learned.arithmetic import Sum, sums


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that ended before its commit point."""

    text: str
    truncated: bool
    """Whether it ran out of tokens."""
    wants_json: bool


Check = Callable[[WholeAnswer], str]
"""Says why the answer is in doubt, in one sentence without any text of it; empty: it found nothing."""


def finished(answer: WholeAnswer) -> str:
    """Doubts an answer that ran out of tokens."""
    return "the answer is unfinished" if answer.truncated else ""


def is_json(answer: WholeAnswer) -> str:
    """Doubts an answer that is not one JSON value, where the request asked for JSON."""
    if not answer.wants_json:
        return ""
    try:
        json.loads(answer.text)
    except ValueError:
        return "the answer is not JSON"
    return ""


def sums_add_up(answer: WholeAnswer) -> str:
    """Doubts an answer with an equation that does not hold, such as "2 + 2 = 5".

    Whole numbers must agree exactly; with decimals or a division, rounding is accepted. What cannot be evaluated is
    accepted.
    """
    wrong = any(_wrong(one) for one in sums(answer.text))
    return "a sum in the answer does not add up" if wrong else ""


CHECKS: Final[Mapping[str, Check]] = {
    "finished": finished,
    "json": is_json,
    "sums": sums_add_up,
}
"""By name."""


def _wrong(one: Sum) -> bool:
    whole = "/" not in one.operators and all(number.is_integer() for number in one.operands)
    return one.value is not None and one.value != one.stated if whole else one.wrong
