"""One task for a model: the user turn, the expected answer and how to grade what came back."""

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

    `prompt` is the user turn as plain text. `content` is what makes the task this task whatever
    its phrasing (the numbers, the ticket); the train / held-out split is decided on it.
    `facts` is what a reply must say, in this order; it is empty for the other kinds.
    `max_tokens` is a hint large enough for every answer of the cell.
    """

    kind: Kind
    level: Level
    prompt: str
    answer: str
    content: str
    max_tokens: int
    facts: tuple[str, ...] = ()

    def grade(self, text: str) -> bool:
        """Say whether `text` is a right answer to this example."""
        return grade(self, text)


def grade(example: Example, text: str) -> bool:
    """Grade one answer.

    A reply is right when it states every fact in order, a total when its last line is the right
    `Total: N` (the working above it is not graded), anything else when it equals the answer.
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
        found = text.find(fact, start)
        if found < 0:
            return False
        start = found + len(fact)
    return start == len(text)  # the last fact is the signature: nothing may follow it


def _last_line(text: str) -> str:
    return text.rsplit("\n", 1)[-1].strip()
