"""Dry run of a new policy: counts where it would decide differently from the active one; nothing is applied."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.safety.actions import Action, TakenAction

Move = tuple[str, Action | None, Action | None]
"""Rule, action of the active policy, action of the dry run; None where only the other policy finds it."""


_MOVES_SAID: Final = 10


def moves_of(now: Iterable[TakenAction], then: Iterable[TakenAction]) -> Counter[Move]:
    """The findings of one text that two policies treat differently."""
    ours, theirs = (
        {(one.rule, one.start, one.end): one.action for one in taken} for taken in (now, then)
    )
    pairs = {place: (ours.get(place), theirs.get(place)) for place in (*ours, *theirs)}
    return Counter((place[0], was, new) for place, (was, new) in pairs.items() if was is not new)


@dataclass
class DryRun:
    """The counts of one trial policy, since it was loaded.

    Attributes:
        policy: its version.
        texts: texts of prompts and answers that both policies decided about.
        changed: of these, how many would differ or be blocked.
        moves: findings that the two policies treat differently.
    """

    policy: str
    texts: int = 0
    changed: int = 0
    moves: Counter[Move] = field(default_factory=Counter)

    def add(self, moves: Mapping[Move, int], changed: bool) -> None:
        """Both have decided about one text."""
        self.texts += 1
        self.changed += changed
        self.moves.update(moves)

    def __str__(self) -> str:
        """One line for a log."""
        most = "; ".join(
            f"{word} {self.moves[move]}"
            for move, _ in self.moves.most_common(_MOVES_SAID)
            for word in move_labels([move])
        )
        return f"dry run of {self.policy}: {self.changed} of {self.texts} texts changed; {most or 'no difference'}"


def move_labels(moves: Iterable[Move]) -> list[str]:
    """Each as "RULE:NOW>THEN", such as "pii.email:flag>redact", in order."""
    return sorted(f"{rule}:{_name(now)}>{_name(then)}" for rule, now, then in moves)


def _name(action: Action | None) -> str:
    return "none" if action is None else action.name.lower()
