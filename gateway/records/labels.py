"""How good the two models' answers to one request were, from a grade and a comparison. Pure code.

| compared | graded | answered by | weak | strong |
|---|---|---|---|---|
| no | no | either | - | - |
| no | g | weak | g | - |
| no | g | strong | - | g |
| agreement a | no | either | a | 1 |
| agreement a | g | strong | a g | g |
| agreement a | g | weak | g | 1 - a (1 - g) |

Without a grade the strong model's answer is the reference. With one, both get it where they agree; where they do not,
a weak answer is as far from right as from the strong one, and a strong answer stays the reference.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Source(Enum):
    """How it is known."""

    GRADE = auto()
    CASCADE = auto()
    SHADOW = auto()


@dataclass(frozen=True, slots=True)
class Compared:
    """How far the two answers agree, 0 to 1, and where the second one came from."""

    agreement: float
    source: Source


@dataclass(frozen=True, slots=True)
class Label:
    """How good an answer was, 0 to 1."""

    quality: float
    source: Source


@dataclass(frozen=True, slots=True)
class Labels:
    """Of both models; None: not known."""

    weak: Label | None
    strong: Label | None


def label(strong_answered: bool, compared: Compared | None, grade: float | None) -> Labels:
    """The labels of one request; the grade is of the answer that the caller got."""
    graded = None if grade is None else Label(grade, Source.GRADE)
    if compared is None:
        return Labels(None, graded) if strong_answered else Labels(graded, None)
    agreement, source = compared.agreement, compared.source
    if strong_answered:
        strong = graded or Label(1.0, source)
        return Labels(Label(agreement * strong.quality, source), strong)
    if graded is None:
        return Labels(Label(agreement, source), Label(1.0, source))
    return Labels(graded, Label(1 - agreement * (1 - graded.quality), source))
