"""One task for a model: the user turn, the expected answer, and how to grade an answer."""

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["classify", "extract", "sort", "total", "reply"]
# `mid` bridges easy and hard in training; it is never part of the held-out set.
Level = Literal["easy", "mid", "hard"]
Cell = tuple[Kind, Level]

# The cells the tiers are judged on, in the order tables print them.
CELLS: Final[tuple[Cell, ...]] = (
    ("classify", "easy"),
    ("extract", "easy"),
    ("reply", "easy"),
    ("sort", "easy"),
    ("total", "easy"),
    ("sort", "hard"),
    ("total", "hard"),
)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        prompt: The user turn as plain text.
        content: What identifies the task whatever its phrasing (the numbers, the ticket); it decides the split.
        facts: What a reply must state, in this order; empty for the other kinds.
        max_tokens: A limit large enough for every answer of the cell.
    """

    kind: Kind
    level: Level
    prompt: str
    answer: str
    content: str
    max_tokens: int
    facts: tuple[str, ...] = ()

    def grade(self, text: str) -> bool:
        """Return whether `text` is a right answer."""
        return grade(self, text)


def grade(example: Example, text: str) -> bool:
    """Return whether an answer is right.

    A reply must state every fact in order. Of a total only its last line is graded, `Total: N`. Anything else must
    equal the expected answer.
    """
    text = text.strip()
    if example.kind == "reply":
        return _states_in_order(text, example.facts)
    if example.kind == "total":
        return _last_line(text) == _last_line(example.answer)
    return text == example.answer


def _states_in_order(text: str, facts: tuple[str, ...]) -> bool:
    start = 0
    for fact in facts:
        position = text.find(fact, start)
        if position < 0:
            return False
        start = position + len(fact)
    return start == len(text)  # the last fact is the signature: nothing may follow it


def _last_line(text: str) -> str:
    return text.rsplit("\n", 1)[-1].strip()
