"""Features of a prompt for learned routers: words, and columns of numbers on size, marks, numbers and options.

Reading is bounded: of a long prompt the head and the tail are read, so a decision costs the same for 2 kB and 2 MB.
An artefact keeps a hash of the names of its columns, so one with other columns is refused.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log1p, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

READ_CHARS_MAX: Final = 1_200
"""Of a longer prompt the first and the last half of this many characters are read."""
VALUE_MAX: Final = 1e12
"""Larger numbers count as this one."""

_TOKEN: Final = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|[0-9]+(?:[.,][0-9]+)*")
_OPTION: Final = re.compile(r"^\(?[A-Ea-e1-9][.)][ \t]", re.MULTILINE)
_SENTENCE: Final = re.compile(r"[.?!](?=\s|$)")
_DIGIT: Final = re.compile(r"[0-9]")
_MARKS: Final = "+-*/=^<>%$\\|_()[]{}?!;:,.\"'"
_MARK_NAMES: Final = tuple(f"mark {mark}" for mark in _MARKS)
_MARK_BYTES: Final = np.frombuffer(_MARKS.encode(), np.uint8)
_MATH_MARKS: Final = _MARKS.index("|")
_CODE: Final = ("def ", "return ", "print(", ";\n", "{\n", "import ")
NUMBER_WORDS: Final = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "dozen": 12, "half": 2, "twice": 2, "third": 3, "thirds": 3, "double": 2, "triple": 3,
    "quarter": 4, "fourth": 4, "fifth": 5, "hundred": 100, "thousand": 1000, "twenty": 20, "thirty": 30,
}  # fmt: skip
_WORD_CLASSES: Final = {
    "relation share": "more less fewer than as times twice half each every per equally split share shared increase"
    " increased decrease decreased discount profit ratio fraction percent average remaining rest total",
    "negation share": "not except least false incorrect cannot never neither nor none without no isn't doesn't don't"
    " won't can't wrong wasn't aren't didn't",
    "function share": "the of and to in a is that for it as was with be by on not he i this are or his from at which"
    " but have an had they you were their one all we can her has there been if more when will would who so no she"
    " other its may these what them than some him time into only could new then any my now such like our over me"
    " also most",
}
"""Words that relate quantities, negate, or carry grammar alone."""
_CLASSES: Final = {name: frozenset(words.split()) for name, words in _WORD_CLASSES.items()}
_OPTIONS_MAX: Final = 6
"""Options that are compared with one another."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, split once for everything that reads it."""

    read: str
    """The part of it that is read."""
    chars: int
    """Length of the whole prompt."""
    tokens: list[str]
    """Words and numbers in lower case, in order."""
    distinct: frozenset[str]
    """The tokens without order."""
    stem: str
    """What precedes the options; everything where there are none."""
    options: list[str]


def parse(prompt: str) -> Text:
    """Splits ``prompt``."""
    read = ends(prompt, READ_CHARS_MAX)
    starts = [match.start() for match in _OPTION.finditer(read)]
    stops = [*starts[1:], len(read)] if starts else []
    options = [read[start:end].partition("\n")[0] for start, end in zip(starts, stops, strict=True)]
    stem = read[: starts[0]] if starts else read
    tokens = _TOKEN.findall(read.lower())
    return Text(read, len(prompt), tokens, frozenset(tokens), stem, options)


def ends(text: str, chars_max: int) -> str:
    """``text``, or its head and tail on two lines where it is longer than ``chars_max``."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n{text[-half:]}"


def describe(text: Text) -> Mapping[str, float]:
    """The columns of a prompt by name."""
    counts = np.bincount(np.frombuffer(text.read.encode(errors="replace"), np.uint8), minlength=256)
    marks = counts[_MARK_BYTES].tolist()
    return {
        **_sizes(text),
        **_numbers([token for token in text.tokens if "0" <= token[0] <= "9"], len(text.tokens)),
        **_word_classes(text),
        "math marks": sum(marks[:_MATH_MARKS]) / max(1, len(text.read)),
        "upper share": int(counts[65:91].sum()) / max(1, len(text.read)),
        "non-ascii": int(counts[128:].sum()),
        **_shapes(text),
        **_options(text),
        **dict(zip(_MARK_NAMES, marks, strict=True)),
    }


def _sizes(text: Text) -> Mapping[str, float]:
    lengths = [len(token) for token in text.tokens] or [0]
    count = len(lengths)
    mean = sum(lengths) / count
    return {
        "chars": text.chars,
        "chars log": log1p(text.chars),
        "words": len(text.tokens),
        "distinct share": len(text.distinct) / count,
        "word length": mean,
        "word length deviation": sqrt(max(0.0, sum(n * n for n in lengths) / count - mean * mean)),
        "long words": sum(n >= 7 for n in lengths) / count,
        "longest words": sum(n >= 10 for n in lengths) / count,
        "lines": text.read.count("\n") + 1,
    }


def _word_classes(text: Text) -> Mapping[str, float]:
    counts = Counter(text.tokens)
    digits = sum("0" <= token[0] <= "9" for token in text.tokens)
    found = {
        name: sum(counts[word] for word in text.distinct & words)
        for name, words in _CLASSES.items()
    }
    return {
        "quantities": digits + sum(counts[word] for word in text.distinct & NUMBER_WORDS.keys()),
        **{name: count / max(1, len(text.tokens)) for name, count in found.items()},
    }


def _numbers(numbers: Sequence[str], tokens: int) -> Mapping[str, float]:
    values = [
        float(number.replace(",", "").replace(".", "", number.count(".") - 1)) for number in numbers
    ]
    return {
        "numbers": len(values),
        "number share": len(values) / max(1, tokens),
        "decimals": sum("." in number for number in numbers),
        "digits max": max(map(len, numbers), default=0),
        "largest log": log1p(min(max(values, default=0), VALUE_MAX)),
        "smallest log": log1p(min(min(values, default=0), VALUE_MAX)),
        "small share": sum(value < 10 for value in values) / max(1, len(values)),
        "distinct numbers": len(set(values)),
        "year": any(len(number) == 4 and "1500" <= number < "2100" for number in numbers),
    }


def _shapes(text: Text) -> Mapping[str, float]:
    stem = text.stem.rstrip()
    sentences = max(1, len(_SENTENCE.findall(text.stem)))
    return {
        "sentences": sentences,
        "words a sentence": len(text.tokens) / sentences,
        "asks": stem.endswith("?"),
        "opens": stem.endswith(":"),
        "states": stem.endswith("."),
        "blank": "__" in text.read,
        "of the above": " of the above" in text.read,
        "quoted": text.read.count('"') > 1,
        "paragraphs": "\n\n" in text.read,
        "roman choices": "ii" in text.distinct,
        "unknowns": not text.distinct.isdisjoint("xyz"),
        "code": any(mark in text.read for mark in _CODE),
    }


def _options(text: Text) -> Mapping[str, float]:
    sizes = [max(0, len(option) - 3) for option in text.options] or [0]
    mean = sum(sizes) / len(sizes)
    digits = [len(_DIGIT.findall(option)) for option in text.options]
    bags = [set(option[2:].lower().split()) for option in text.options[:_OPTIONS_MAX]]
    stem = set(text.stem.lower().split()) if bags else set()
    pairs = [len(a & b) / (1 + len(a | b)) for a, b in combinations(bags, 2)]
    return {
        "options": len(text.options),
        "stem chars": len(text.stem),
        "stem share": len(text.stem) / max(1, len(text.read)),
        "option chars": mean,
        "option deviation": sqrt(sum((size - mean) ** 2 for size in sizes) / len(sizes)),
        "option max": max(sizes),
        "option min": min(sizes),
        "option spread": max(sizes) / (1 + min(sizes)),
        "option digits": sum(digits) / len(sizes),
        "options with digits": sum(count > 0 for count in digits) / len(sizes),
        "option overlap": sum(pairs) / max(1, len(pairs)),
        "stem overlap": sum(len(bag & stem) / (1 + len(bag)) for bag in bags) / max(1, len(bags)),
    }


NAMES: Final[tuple[str, ...]] = tuple(describe(parse("")))
