"""The columns that describe a prompt: its size, its marks, its words, its options. No learning here.

Counted once over bytes and once over words: about 0.1 ms for 1 kB. `NAMES` gives each column its name; an artefact
carries them, so that another set of columns is refused.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations
from math import log1p, sqrt
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import lexicon
from gateway.routing.learned.text import Text

Vector = NDArray[np.float32]

_MARKS: Final = "+-*/=^<>%$\\|_()[]{}?!;:,.\"'"
_MARK_BYTES: Final = np.frombuffer(_MARKS.encode(), np.uint8)
_MATH_MARKS: Final = len("+-*/=^<>%$\\")
_SLOTS: Final = lexicon.slots()
_SLOT_COUNT: Final = len(lexicon.SINGLE) + len(lexicon.CLASSES)
_COUNT_MAX: Final = 4
_SENTENCE: Final = re.compile(r"[.?!](?=\s|$)")
_DIGIT: Final = re.compile(r"[0-9]")
_OPTIONS_MAX: Final = 6
"""Options that are compared with one another."""
_CODE: Final = ("def ", "return ", "print(", ";\n", "{\n", "import ")
_LETTERS: Final = frozenset("xyz")
_SIZES: Final = (
    "chars", "chars log", "words", "distinct share", "word length", "word length deviation", "long words",
    "longest words", "function share", "negation share", "relation share", "lines",
)  # fmt: skip
_NUMBERS: Final = (
    "numbers", "number share", "decimals", "digits max", "quantities", "largest log", "smallest log", "small share",
    "distinct numbers",
)  # fmt: skip
_SHAPES: Final = (
    "math marks", "upper share", "non-ascii", "sentences", "words a sentence", "asks", "opens", "states",
    "blank", "of the above", "quoted", "paragraphs", "roman choices", "year", "unknowns", "code",
)  # fmt: skip
_OPTIONS: Final = (
    "options", "stem chars", "stem share", "option chars", "option deviation", "option max", "option min",
    "option spread", "option digits", "options with digits", "option overlap", "stem overlap",
)  # fmt: skip

NAMES: Final[tuple[str, ...]] = (
    *_SIZES,
    *_NUMBERS,
    *_SHAPES,
    *_OPTIONS,
    *(f"mark {mark}" for mark in _MARKS),
    *(f"word {word}" for word in lexicon.SINGLE),
    *(f"class {name}" for name in lexicon.CLASSES),
)
_SINGLE: Final = slice(
    len(NAMES) - len(lexicon.CLASSES) - len(lexicon.SINGLE), len(NAMES) - len(lexicon.CLASSES)
)


def describe(text: Text) -> Vector:
    """The columns ``NAMES`` of a prompt, float32."""
    counts = np.bincount(np.frombuffer(text.read.encode(errors="replace"), np.uint8), minlength=256)
    marks = counts[_MARK_BYTES].tolist()
    slots = _count_slots(text.tokens)
    numbers = [token for token in text.tokens if "0" <= token[0] <= "9"]
    row = np.array(
        [
            *_sizes(text, len(numbers), slots),
            *_numbers(text, numbers, slots),
            *_shapes(text, numbers, counts, marks),
            *_options(text),
            *marks,
            *slots,
        ],
        np.float32,
    )
    np.minimum(row[_SINGLE], _COUNT_MAX, out=row[_SINGLE])
    return row


def _count_slots(tokens: Sequence[str]) -> list[int]:
    slots = [0] * _SLOT_COUNT
    find = _SLOTS.get
    for token in tokens:
        for slot in find(token, ()):
            slots[slot] += 1
    return slots


_CLASS: Final = {name: len(lexicon.SINGLE) + at for at, name in enumerate(lexicon.CLASSES)}


def _sizes(text: Text, numbers: int, slots: Sequence[int]) -> tuple[float, ...]:
    lengths = sorted(map(len, text.tokens)) or [0]
    count = len(lengths)
    mean = sum(lengths) / count
    squares = sum(map(mul, lengths, lengths))
    return (
        text.chars,
        log1p(text.chars),
        len(text.tokens) - numbers,
        len(text.distinct) / count,
        mean,
        sqrt(max(0.0, squares / count - mean * mean)),
        (count - bisect_left(lengths, 7)) / count,
        (count - bisect_left(lengths, 10)) / count,
        slots[_CLASS["function"]] / count,
        slots[_CLASS["negation"]] / count,
        slots[_CLASS["relation"]] / count,
        text.read.count("\n") + 1,
    )


def _numbers(text: Text, numbers: Sequence[str], slots: Sequence[int]) -> tuple[float, ...]:
    values = [
        float(number.replace(",", "").replace(".", "", number.count(".") - 1)) for number in numbers
    ]
    return (
        len(numbers),
        len(numbers) / max(1, len(text.tokens)),
        sum("." in number for number in numbers),
        max(map(len, numbers), default=0),
        len(numbers) + slots[_CLASS["number"]],
        log1p(min(max(values, default=0), 1e12)),
        log1p(min(min(values, default=0), 1e12)),
        sum(value < 10 for value in values) / len(values) if values else 0.0,
        len(set(values)),
    )


def _shapes(
    text: Text, numbers: Sequence[str], counts: NDArray[np.int64], marks: Sequence[int]
) -> tuple[float, ...]:
    size = max(1, len(text.read))
    stem = text.stem.rstrip()
    sentences = max(1, len(_SENTENCE.findall(text.stem)))
    return (
        sum(marks[:_MATH_MARKS]) / size,
        int(counts[65:91].sum()) / size,
        int(counts[128:].sum()),
        sentences,
        len(text.tokens) / sentences,
        stem.endswith("?"),
        stem.endswith(":"),
        stem.endswith("."),
        "__" in text.read,
        " of the above" in text.read,
        text.read.count('"') > 1,
        "\n\n" in text.read,
        "ii" in text.distinct,
        any(len(number) == 4 and "1500" <= number < "2100" for number in numbers),
        not _LETTERS.isdisjoint(text.distinct),
        any(mark in text.read for mark in _CODE),
    )


def _options(text: Text) -> tuple[float, ...]:
    stem_share = len(text.stem) / max(1, len(text.read))
    if not text.options:
        return (0, len(text.stem), stem_share, *([0.0] * 9))
    sizes = [max(0, len(option) - 3) for option in text.options]
    mean = sum(sizes) / len(sizes)
    digits = [len(_DIGIT.findall(option)) for option in text.options]
    bags = [set(option[2:].lower().split()) for option in text.options[:_OPTIONS_MAX]]
    stem = set(text.stem.lower().split())
    overlaps = [len(a & b) for a, b in combinations(bags, 2)]
    unions = [
        len(a) + len(b) - both for (a, b), both in zip(combinations(bags, 2), overlaps, strict=True)
    ]
    pairs = [both / (1 + union) for both, union in zip(overlaps, unions, strict=True)]
    return (
        len(sizes),
        len(text.stem),
        stem_share,
        mean,
        sqrt(sum((size - mean) ** 2 for size in sizes) / len(sizes)),
        max(sizes),
        min(sizes),
        max(sizes) / (1 + min(sizes)),
        sum(digits) / len(digits),
        sum(count > 0 for count in digits) / len(digits),
        sum(pairs) / max(1, len(pairs)),
        sum(len(bag & stem) / (1 + len(bag)) for bag in bags) / len(bags),
    )
