"""Dry run of a new policy: counts where it would decide differently from the active one; nothing is applied."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.safety.actions import Action, TakenAction

Move = tuple[str, Action | None, Action | None]
"""Rule, action of the active policy, action of the policy in dry run; None where only the other policy
finds it.
"""


def moves_of(active: Iterable[TakenAction], trial: Iterable[TakenAction]) -> Counter[Move]:
    """Count the findings of one text that two policies treat differently."""
    before, after = _by_place(active), _by_place(trial)
    moves = ((place[0], before.get(place), after.get(place)) for place in {**before, **after})
    return Counter(move for move in moves if move[1] is not move[2])


def _by_place(taken: Iterable[TakenAction]) -> dict[tuple[str, int, int], Action]:
    return {(finding.rule, finding.start, finding.end): finding.action for finding in taken}


@dataclass
class DryRun:
    """Counts of a policy in dry run, since it was loaded.

    Attributes:
        policy: version of the policy.
        texts: texts of prompts and answers that both policies decided about.
        changed: number of these that would differ or be blocked.
        moves: findings that the two policies treat differently.
    """

    policy: str
    texts: int = 0
    changed: int = 0
    moves: Counter[Move] = field(default_factory=Counter)

    def add(self, moves: Mapping[Move, int], changed: bool) -> None:
        """Count one text that both policies decided about."""
        self.texts += 1
        self.changed += changed
        self.moves.update(moves)


def move_labels(moves: Iterable[Move]) -> list[str]:
    """Return each difference as "RULE:NOW>THEN", such as "pii.email:flag>redact", in order."""
    names: dict[Action | None, str] = {action: action.name.lower() for action in Action}
    names[None] = "none"
    return sorted(f"{rule}:{names[active]}>{names[trial]}" for rule, active, trial in moves)
