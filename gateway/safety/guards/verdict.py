"""What a guard said, and what that means."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Failure(enum.StrEnum):
    """Why there is no verdict; the names stand behind "guard.NAME." in records."""

    TIMEOUT = "timeout"
    """It did not come within the time budget."""
    UNAVAILABLE = "unavailable"
    """No worker serves the guard's model."""
    OVERLOADED = "overloaded"
    TOO_LONG = "too_long"
    """The text does not fit the guard's context."""
    UNPARSABLE = "unparsable"
    """What the guard said is no verdict."""
    FAILED = "failed"
    """Anything else."""


@dataclass(frozen=True)
class Verdict:
    """What a guard decided.

    Attributes:
        flagged: whether it objects.
        categories: to what; at least one when it objects.
        score: how sure it is that there is something to object to, 0 to 1; None: it does not say.
    """

    flagged: bool
    categories: tuple[str, ...] = ()
    score: float | None = None


Outcome = Verdict | Failure


class Unparsable(ValueError):
    """What a guard said is no verdict."""


@dataclass(frozen=True)
class Option:
    """A token that could have stood at a place.

    Attributes:
        text: of this token alone.
        logprob: natural logarithm of its probability.
    """

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Said:
    """The answer of a guard's row.

    Attributes:
        options: the most probable tokens of each place; empty lists where they were not told.
    """

    text: str
    options: Sequence[Sequence[Option]] = ()


class Reader(Protocol):
    """Reads the answers of one family of guards."""

    def read(self, said: Said) -> Verdict:
        """The verdict.

        Raises:
            Unparsable: there is none.
        """


def chance_of(said: Said, yes: str, no: str) -> float | None:
    """How probable ``yes`` is against ``no`` at the first place that says a word; None: that is not told.

    Both are in lower case. A token counts for the word that it begins, or that begins it.
    """
    for place in said.options:
        if not place or not place[0].text.strip():
            continue  # line breaks come first in some families
        for_yes = sum(math.exp(one.logprob) for one in place if _begins(one.text, yes))
        for_no = sum(math.exp(one.logprob) for one in place if _begins(one.text, no))
        both = for_yes + for_no
        return for_yes / both if both > 0 else None
    return None


def _begins(text: str, word: str) -> bool:
    text = text.strip().lower()
    return bool(text) and (word.startswith(text) or text.startswith(word))
