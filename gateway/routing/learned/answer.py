"""Features of a small model's answer: whether its sums are right and complete, whether it hedges, and more.

Both ends of the answer are read, `READ_CHARS_MAX` characters together. Columns are plain numbers;
training learns their weights.
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
"""Length of a prompt or answer that is read, head and tail together, in characters."""
VALUE_MAX: Final = 1e12
"""Larger numbers count as this one."""

_MARKUP: Final = re.compile(r"<+[^<>\s][^<>\n]{0,160}>+")
"""Tags and annotations; what a reader sees is read."""
_ENDED: Final = re.compile(r"[.!?)\]}`\d]\s*$")
_CHOICE: Final = re.compile(r"\(?\b([A-E])\b[.):]?")
_WORD: Final = re.compile(r"[a-z]+")
_HEDGES: Final = (
    "however", "but ", "assum", "possible", "cannot", "unclear", "not enough", "mistake", "actually", "approximately",
    "either", "unknown", "wait", "instead", "should", "seems", "sorry", "depends",
)  # fmt: skip
_OPERATION_WORDS: Final = {
    "+": "total altogether sum combined together more",
    "-": "left remaining remain fewer less rest difference",
    "*": "times each every per twice double triple percent",
    "/": "half third quarter thirds quarters average split equally shared divided per",
}


def columns(prompt: str, answer: str) -> NDArray[np.float32]:
    """Return the columns of `answer` to `prompt` as an array of `len(NAMES)`."""
    return np.array([*describe(prompt, answer).values()], np.float32)


def describe(prompt: str, answer: str) -> Mapping[str, float]:
    """Return the columns of `answer` to `prompt` by name."""
    prompt, answer = ends(prompt, READ_CHARS_MAX), ends(answer.strip(), READ_CHARS_MAX)
    answer = _MARKUP.sub("", answer)
    prompt_numbers, sums = arithmetic.numbers(prompt), arithmetic.sums(answer)
    words, lower = _WORD.findall(prompt.lower()), answer.lower()
    return {
        **_prompt(len(prompt), len(words), prompt_numbers),
        **_whole(answer, set(prompt_numbers)),
        **_sums(sums),
        "missing operations": _missing(
            set(words), "".join(computed.operators for computed in sums)
        ),
        **{f"says {hedge.strip()}": min(3, lower.count(hedge)) for hedge in _HEDGES},
    }


def _prompt(chars: int, words: int, prompt_numbers: Sequence[float]) -> Mapping[str, float]:
    """Describe how much the prompt asks for: its size and its numbers."""
    capped = [min(value, VALUE_MAX) for value in prompt_numbers] or [0]
    return {
        "prompt chars log": log1p(chars),
        "prompt words": words,
        "prompt decimals": sum(value != int(value) for value in capped),
        "prompt largest log": log1p(max(capped)),
        "prompt smallest log": log1p(min(capped)),
        "prompt small share": sum(value < 10 for value in prompt_numbers)
        / max(1, len(prompt_numbers)),
    }


def _whole(answer: str, prompt_numbers: set[float]) -> Mapping[str, float]:
    """Describe the whole answer: its end, repetitions, chosen options, and the prompt's numbers it leaves out."""
    lines = [line for line in answer.splitlines() if line.strip()]
    unmentioned = len(prompt_numbers - set(arithmetic.numbers(answer)))
    return {
        "chars log": log1p(len(answer)),
        "unfinished": _ENDED.search(answer) is None,
        "repeated lines": len(lines) - len(set(lines)),
        "choices": len(set(_CHOICE.findall(answer))),
        "unmentioned share": unmentioned / (1 + len(prompt_numbers)),
    }


def _sums(sums: Sequence[Sum]) -> Mapping[str, float]:
    wrong = sum(computed.is_wrong for computed in sums)
    kinds = [sum(computed.operators.count(mark) for computed in sums) for mark in "+-*/"]
    return {
        "sums": len(sums),
        "wrong sums": wrong,
        "any wrong": wrong > 0,
        "fractions": sum(abs(computed.stated - round(computed.stated)) > 1e-6 for computed in sums),
        **dict(zip(("additions", "subtractions", "products", "quotients"), kinds, strict=True)),
        "unused results": _unused_results(sums),
    }


def _unused_results(sums: Sequence[Sum]) -> int:
    """Count the results that no later sum uses; the last one is the answer."""
    return sum(
        all(computed.stated not in later.operands for later in sums[at + 1 :])
        for at, computed in enumerate(sums[:-1])
    )


def _missing(words: set[str], operators: str) -> int:
    """Count the words of the prompt that ask for more operations than the sums have."""
    return sum(
        max(0, len(words.intersection(asking.split())) - operators.count(mark))
        for mark, asking in _OPERATION_WORDS.items()
    )


NAMES: Final[tuple[str, ...]] = tuple(describe("", ""))
