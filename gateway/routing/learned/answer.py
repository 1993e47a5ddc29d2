"""The columns that describe a small model's answer beside its prompt: do its sums add up, does it use what the prompt
gives, is it finished, does it hedge.

Two thousand characters of either end are read. Columns are plain numbers; what they mean for being right is learned.
"""

import re
from collections.abc import Sequence
from math import log1p
from typing import Final

import numpy as np

from gateway.routing.learned import arithmetic
from gateway.routing.learned.arithmetic import Sum
from gateway.routing.learned.features import Vector
from gateway.routing.learned.text import ends

READ_CHARS_MAX: Final = 4_000

_FINAL: Final = re.compile(
    r"(?:####|\\boxed\{|final answer(?: is)?:?|answer is:?)\s*\$?\s*(-?[\d,]*\.?\d+)", re.I
)
_SENTENCE: Final = re.compile(r"[.!?](?=\s|$)")
_ENDED: Final = re.compile(r"(?:[.!?)\]}`]|####[^\n]*\d[^\n]*)\s*$")
_LIST_ITEM: Final = re.compile(r"^\s*(?:\d+\.|[-*])\s", re.MULTILINE)
_UNKNOWN: Final = re.compile(r"\b[a-z]\s*=|\blet\b|\bequation\b", re.I)
_WORD: Final = re.compile(r"[a-z]+")
_HEDGES: Final = (
    "however", "but ", "assum", "possible", "can't", "cannot", "unclear", "not enough", "doesn't", "mistake",
    "actually", "approximately", "round", "therefore", "either", "unknown", "wait", "instead", "should", "seems",
    "sorry", "depends", "total", "each", "left", "more", "so ",
)  # fmt: skip
_SPELLED: Final = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "dozen": 12, "half": 2, "twice": 2, "third": 3, "thirds": 3, "double": 2, "triple": 3,
    "quarter": 4, "fourth": 4, "fifth": 5, "hundred": 100, "thousand": 1000, "twenty": 20, "thirty": 30,
}  # fmt: skip
_CONSTANTS: Final = frozenset((1, 2, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000))
"""Numbers that an answer may bring along: days, hours, percent."""

_OPERATION_WORDS: Final = {
    "+": "total altogether sum combined together more",
    "-": "left remaining remain fewer less rest difference",
    "*": "times each every per twice double triple percent",
    "/": "half third quarter thirds quarters average split equally shared divided per",
}
_OPERATIONS_OF: Final = {
    word: tuple(kind for kind, words in _OPERATION_WORDS.items() if word in words.split())
    for words in _OPERATION_WORDS.values()
    for word in words.split()
}
"""What a word of a prompt asks an answer to do."""
_ASKS_BACK: Final = (
    "start",
    "original",
    "initial",
    "at first",
    "before",
    "begin",
    "old is",
    "did he have",
    "did she have",
)
"""A prompt that gives the end and asks for the beginning."""

_SIZES: Final = (
    "chars",
    "chars log",
    "words",
    "lines",
    "sentences",
    "list items",
    "of prompt",
    "repeated lines",
)
_FINALS: Final = (
    "marked", "missing", "unfinished", "fraction", "negative", "zero", "log", "in prompt", "last sum", "earlier sum",
    "above prompt", "fraction of how many",
)  # fmt: skip
_SUMS: Final = (
    "sums", "wrong sums", "any wrong", "unread sums", "fractions", "any fraction", "negatives", "additions",
    "subtractions", "products", "quotients", "kinds", "unused results", "foreign operands", "largest",
)  # fmt: skip
_USE: Final = (
    "quantities", "unused", "unused share", "unmentioned", "unmentioned share", "sums per quantity", "missing sums",
    "percent unused", "unknowns", "spelled unused", "asks back", *(f"missing {kind}" for kind in _OPERATION_WORDS),
    "missing operations",
)  # fmt: skip

NAMES: Final[tuple[str, ...]] = tuple(
    f"answer {name}"
    for name in (*_SIZES, *_FINALS, *_SUMS, *_USE, *(f"says {h.strip()}" for h in _HEDGES))
)


def describe(prompt: str, answer: str) -> Vector:
    """The columns ``NAMES`` of ``answer`` to ``prompt``, float32."""
    prompt, answer = ends(prompt, READ_CHARS_MAX), ends(answer.strip(), READ_CHARS_MAX)
    plain = arithmetic.unmarked(answer)
    sums = arithmetic.sums(answer)
    given = arithmetic.numbers(prompt)
    lower = plain.lower()
    row = [
        *_sizes(prompt, plain),
        *_finals(prompt, plain, sums, given),
        *_sums(sums, given, _spelled(prompt)),
        *_use(prompt, plain, sums, given),
        *(min(3, lower.count(hedge)) for hedge in _HEDGES),
    ]
    return np.array(row, np.float32)


def _sizes(prompt: str, answer: str) -> tuple[float, ...]:
    lines = [line for line in answer.splitlines() if line.strip()]
    return (
        len(answer),
        log1p(len(answer)),
        len(answer.split()),
        len(lines),
        len(_SENTENCE.findall(answer)),
        len(_LIST_ITEM.findall(answer)),
        len(answer) / (1 + len(prompt)),
        len(lines) - len(set(lines)),
    )


def _finals(
    prompt: str, answer: str, sums: Sequence[Sum], given: Sequence[float]
) -> tuple[float, ...]:
    marked = _FINAL.findall(answer)
    numbers = arithmetic.numbers(answer)
    final = _number(marked[-1]) if marked else (numbers[-1] if numbers else None)
    value = final or 0.0
    results = [each.stated for each in sums]
    whole = abs(value - round(value)) < 1e-6
    return (
        bool(marked),
        final is None,
        _ENDED.search(answer) is None,
        not whole,
        value < 0,
        value == 0,
        log1p(min(abs(value), 1e12)),
        value in given,
        results[-1] == value if results else 0.5,
        value in results[:-1],
        log1p(min(abs(value), 1e12)) - log1p(min(max(given, default=1), 1e12)),
        not whole and "how many" in prompt.lower(),
    )


def _sums(
    sums: Sequence[Sum], given: Sequence[float], spelled: Sequence[float]
) -> tuple[float, ...]:
    operators = "".join(each.operators for each in sums)
    kinds = [operators.count(mark) for mark in "+-*/"]
    fractions = sum(abs(each.stated - round(each.stated)) > 1e-6 for each in sums)
    wrong = sum(each.wrong for each in sums)
    return (
        len(sums),
        wrong,
        wrong > 0,
        sum(each.value is None for each in sums),
        fractions,
        fractions > 0,
        sum(each.stated < 0 for each in sums),
        *kinds,
        sum(count > 0 for count in kinds),
        _unused_results(sums),
        _foreign(sums, {*given, *spelled, *_CONSTANTS}),
        log1p(max((min(abs(each.stated), 1e12) for each in sums), default=0)),
    )


def _unused_results(sums: Sequence[Sum]) -> int:
    """Results that no later sum takes up; the last one is the answer."""
    return sum(
        all(each.stated not in later.operands for later in sums[at + 1 :])
        for at, each in enumerate(sums[:-1])
    )


def _foreign(sums: Sequence[Sum], known: set[float]) -> int:
    """Operands that neither the prompt gives nor an earlier sum made."""
    foreign = 0
    for each in sums:
        foreign += sum(operand not in known for operand in each.operands)
        known.add(each.stated)
    return foreign


def _use(
    prompt: str, answer: str, sums: Sequence[Sum], given: Sequence[float]
) -> tuple[float, ...]:
    distinct = set(given)
    operands = {operand for each in sums for operand in each.operands}
    unused = len(distinct - operands)
    unmentioned = len(distinct - set(arithmetic.numbers(answer)))
    quantities = len(given) + len(_spelled(prompt))
    return (
        quantities,
        unused,
        unused / (1 + len(distinct)),
        unmentioned,
        unmentioned / (1 + len(distinct)),
        len(sums) / (1 + quantities),
        quantities - len(sums),
        "%" in prompt and "%" not in answer and "/100" not in answer,
        len(_UNKNOWN.findall(answer)),
        len({value for value in _spelled(prompt) if value > 2} - operands) if sums else 0,
        sum(phrase in prompt.lower() for phrase in _ASKS_BACK),
        *_missing(prompt, sums),
    )


def _missing(prompt: str, sums: Sequence[Sum]) -> tuple[float, ...]:
    """For each kind of operation how many the prompt's words ask for and the answer does not have, then all."""
    asked = dict.fromkeys(_OPERATION_WORDS, 0)
    for word in set(_WORD.findall(prompt.lower())):
        for kind in _OPERATIONS_OF.get(word, ()):
            asked[kind] += 1
    operators = "".join(each.operators for each in sums)
    missing = [max(0, count - operators.count(kind)) for kind, count in asked.items()]
    return (*missing, sum(missing))


def _spelled(prompt: str) -> list[float]:
    return [_SPELLED[word] for word in _WORD.findall(prompt.lower()) if word in _SPELLED]


def _number(text: str) -> float:
    return float(text.replace(",", ""))
