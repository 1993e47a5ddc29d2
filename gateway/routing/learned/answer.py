"""Features of a small model's answer to its prompt: whether its sums add up, it uses the numbers of the prompt,
it is complete, it hedges, and which option it chooses.

Two thousand characters of either end are read. Columns are plain numbers; training learns their weights.
"""

import re
from collections.abc import Mapping, Sequence
from math import log1p
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import arithmetic
from gateway.routing.learned.arithmetic import Sum
from gateway.routing.learned.features import ends

READ_CHARS_MAX: Final = 4_000
VALUE_MAX: Final = 1e12
"""Larger numbers count as this one."""
NUMBER_WORDS: Final = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "dozen": 12, "half": 2, "twice": 2, "third": 3, "thirds": 3, "double": 2, "triple": 3,
    "quarter": 4, "fourth": 4, "fifth": 5, "hundred": 100, "thousand": 1000, "twenty": 20, "thirty": 30,
}  # fmt: skip

_MARKUP: Final = re.compile(r"<+[^<>\s][^<>\n]{0,160}>+")
"""Tags and annotations; what a reader sees is read."""
_FINAL: Final = re.compile(r"(?:\\boxed\{|answer(?: is)?:?)\s*\$?\s*(-?[\d,]*\.?\d+)", re.I)
_SENTENCE: Final = re.compile(r"[.!?](?=\s|$)")
_ENDED: Final = re.compile(r"[.!?)\]}`\d]\s*$")
_LIST_ITEM: Final = re.compile(r"^\s*(?:\d+\.|[-*])\s", re.MULTILINE)
_UNKNOWN: Final = re.compile(r"\b[a-z]\s*=|\blet\b|\bequation\b", re.I)
_CHOICE: Final = re.compile(r"\(?\b([A-E])\b[.):]?")
_WORD: Final = re.compile(r"[a-z]+")
_HEDGES: Final = (
    "however", "but ", "assum", "possible", "cannot", "unclear", "not enough", "mistake", "actually", "approximately",
    "either", "unknown", "wait", "instead", "should", "seems", "sorry", "depends",
)  # fmt: skip
_CONSTANTS: Final = frozenset((1, 2, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000))
"""Numbers that an answer may add by itself: days, hours, percent."""
_OPERATION_WORDS: Final = {
    "+": "total altogether sum combined together more",
    "-": "left remaining remain fewer less rest difference",
    "*": "times each every per twice double triple percent",
    "/": "half third quarter thirds quarters average split equally shared divided per",
}


def columns(prompt: str, answer: str) -> NDArray[np.float32]:
    """[len(NAMES)]: the columns of ``answer`` to ``prompt``."""
    return np.array([*describe(prompt, answer).values()], np.float32)


def describe(prompt: str, answer: str) -> Mapping[str, float]:
    """The columns of ``answer`` to ``prompt`` by name."""
    prompt, answer = ends(prompt, READ_CHARS_MAX), ends(answer.strip(), READ_CHARS_MAX)
    answer = _MARKUP.sub("", answer)
    found = arithmetic.sums(answer)
    given = arithmetic.numbers(prompt)
    words = _WORD.findall(prompt.lower())
    spelled = [NUMBER_WORDS[word] for word in words if word in NUMBER_WORDS]
    lower = answer.lower()
    return {
        **_prompt(len(prompt), len(words), given),
        **_sizes(prompt, answer),
        **_final(prompt, answer, found, given),
        **_sums(found, {*given, *spelled, *_CONSTANTS}),
        **_use(answer, found, given, spelled),
        **_missing(set(words), "".join(each.operators for each in found)),
        "percent unused": "%" in prompt and "%" not in answer and "/100" not in answer,
        **{f"says {hedge.strip()}": min(3, lower.count(hedge)) for hedge in _HEDGES},
    }


def _prompt(chars: int, words: int, given: Sequence[float]) -> Mapping[str, float]:
    """How much the prompt asks for: its size and its numbers."""
    capped = [min(value, VALUE_MAX) for value in given] or [0]
    return {
        "prompt chars log": log1p(chars),
        "prompt words": words,
        "prompt number share": len(given) / (1 + words),
        "prompt decimals": sum(value != int(value) for value in capped),
        "prompt largest log": log1p(max(capped)),
        "prompt smallest log": log1p(min(capped)),
        "prompt small share": sum(value < 10 for value in given) / max(1, len(given)),
        "prompt distinct numbers": len(set(given)),
    }


def _sizes(prompt: str, answer: str) -> Mapping[str, float]:
    lines = [line for line in answer.splitlines() if line.strip()]
    return {
        "chars": len(answer),
        "chars log": log1p(len(answer)),
        "words": len(answer.split()),
        "lines": len(lines),
        "sentences": len(_SENTENCE.findall(answer)),
        "list items": len(_LIST_ITEM.findall(answer)),
        "of prompt": len(answer) / (1 + len(prompt)),
        "repeated lines": len(lines) - len(set(lines)),
        "unfinished": _ENDED.search(answer) is None,
        "unknowns": len(_UNKNOWN.findall(answer)),
    }


def _final(
    prompt: str, answer: str, found: Sequence[Sum], given: Sequence[float]
) -> Mapping[str, float]:
    """Of the final number, marked as the answer or the last one, and of the option that is chosen."""
    marked = _FINAL.findall(answer)
    numbers = [float(text.replace(",", "")) for text in marked[-1:]] or arithmetic.numbers(answer)
    value = numbers[-1] if numbers else 0.0
    whole = abs(value - round(value)) < 1e-6
    results = [each.stated for each in found]
    size = log1p(min(abs(value), VALUE_MAX))
    return {
        "marked": bool(marked),
        "missing": not numbers,
        "fraction": not whole,
        "negative": value < 0,
        "zero": value == 0,
        "log": size,
        "in prompt": value in given,
        "last sum": results[-1] == value if results else 0.5,
        "earlier sum": value in results[:-1],
        "above prompt": size - log1p(min(max(given, default=1), VALUE_MAX)),
        "fraction of how many": not whole and "how many" in prompt.lower(),
        "chooses": _CHOICE.match(answer) is not None,
        "choices": len(set(_CHOICE.findall(answer))),
    }


def _sums(found: Sequence[Sum], known: set[float]) -> Mapping[str, float]:
    kinds = [sum(each.operators.count(mark) for each in found) for mark in "+-*/"]
    fractions = sum(abs(each.stated - round(each.stated)) > 1e-6 for each in found)
    wrong = sum(each.wrong for each in found)
    return {
        "sums": len(found),
        "wrong sums": wrong,
        "any wrong": wrong > 0,
        "unread sums": sum(each.value is None for each in found),
        "fractions": fractions,
        "any fraction": fractions > 0,
        "negatives": sum(each.stated < 0 for each in found),
        **dict(zip(("additions", "subtractions", "products", "quotients"), kinds, strict=True)),
        "kinds": sum(count > 0 for count in kinds),
        "unused results": _unused_results(found),
        "foreign operands": _foreign(found, known),
        "largest": log1p(max((min(abs(each.stated), VALUE_MAX) for each in found), default=0)),
    }


def _unused_results(found: Sequence[Sum]) -> int:
    """Results that no later sum uses; the last one is the answer."""
    return sum(
        all(each.stated not in later.operands for later in found[at + 1 :])
        for at, each in enumerate(found[:-1])
    )


def _foreign(found: Sequence[Sum], known: set[float]) -> int:
    """Operands that are neither ``known`` nor the result of an earlier sum."""
    foreign = 0
    for each in found:
        foreign += sum(operand not in known for operand in each.operands)
        known.add(each.stated)
    return foreign


def _use(
    answer: str, found: Sequence[Sum], given: Sequence[float], spelled: Sequence[float]
) -> Mapping[str, float]:
    """How far the answer uses the numbers of the prompt."""
    distinct = set(given)
    operands = {operand for each in found for operand in each.operands}
    unused = len(distinct - operands)
    unmentioned = len(distinct - set(arithmetic.numbers(answer)))
    quantities = len(given) + len(spelled)
    return {
        "quantities": quantities,
        "unused": unused,
        "unused share": unused / (1 + len(distinct)),
        "unmentioned": unmentioned,
        "unmentioned share": unmentioned / (1 + len(distinct)),
        "sums per quantity": len(found) / (1 + quantities),
        "missing sums": quantities - len(found),
        "spelled unused": len({value for value in spelled if value > 2} - operands) * bool(found),
    }


def _missing(words: set[str], operators: str) -> Mapping[str, float]:
    """For each operation how many words of the prompt ask for it beyond those in the sums, then all."""
    missing = {
        f"missing {mark}": max(0, len(words.intersection(asking.split())) - operators.count(mark))
        for mark, asking in _OPERATION_WORDS.items()
    }
    return {**missing, "missing operations": sum(missing.values())}


NAMES: Final[tuple[str, ...]] = tuple(describe("", ""))
