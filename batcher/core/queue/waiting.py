"""All tasks that wait, by class, and the order in which classes have their turn."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batcher.core.queue.classes import WaitingClass
from batcher.core.queue.entries import Entry
from batcher.core.queue.lengths import OutputLengths
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES


class Turn(NamedTuple):
    """Rows that a class may send now."""

    members: WaitingClass
    rows: float
    overdue: bool
    """Out of its rank, because it has waited too long."""
    spare_rows: int
    """Rows of a worker that it leaves free."""
    prefill_s_max: float
    """What computing the prompts that wait in a worker may take with what it sends."""
    is_modest: bool
    """These are less than they may be, for the sake of more urgent classes."""


class _Place(NamedTuple):
    """A class, and each turn that it may have."""

    members: WaitingClass
    aging_s: float
    turn: Turn
    modest: Turn
    overdue: Turn


class _Count:
    """Tasks of one class, and their tokens."""

    __slots__ = ("tasks", "tokens")

    def __init__(self) -> None:
        self.tasks = self.tokens = 0


class Waiting:
    """Tasks that wait.

    Attributes:
        handed_out: tokens, prompt and expected answer, of all tasks that were ever taken.
        classes: the most urgent first; a single one where classes make no difference.
    """

    def __init__(
        self, policy: Policy, weights: Mapping[str, float], lengths: OutputLengths
    ) -> None:
        names = CLASSES if policy.by_class else CLASSES[:1]
        shares = weights if policy.by_tenant else None
        self.handed_out = 0
        self.classes = tuple(WaitingClass(policy, name, shares, lengths) for name in names)
        self._spare_s = policy.spare_s
        self._places = [_place(members, policy.aging_rows) for members in self.classes]
        self._of = {
            name: self.classes[rank if policy.by_class else 0] for rank, name in enumerate(CLASSES)
        }
        self._counts = None if policy.by_class else {name: _Count() for name in CLASSES}

    @property
    def count(self) -> int:
        """How many."""
        count = 0
        for members in self.classes:  # For every batch: `sum` takes twice as long.
            count += members.waiting
        return count

    @property
    def prefill_tokens(self) -> int:
        """What a worker would have to compute before their next tokens."""
        return sum(members.prefill_tokens for members in self.classes)

    def of(self, priority_class: str) -> WaitingClass:
        """Where tasks of the class wait."""
        return self._of[priority_class]

    def count_of(self, priority_class: str) -> int:
        """Tasks of one class."""
        if self._counts is None:
            return self._of[priority_class].waiting
        return self._counts[priority_class].tasks

    def tokens_of(self, priority_class: str) -> int:
        """Their prompts and expected answers."""
        if self._counts is None:
            return self._of[priority_class].tokens
        return self._counts[priority_class].tokens

    def tokens_before(self, priority_class: str, tenant: str) -> float:
        """Tokens, prompt and expected answer, that go before a new task of the class and tenant."""
        ahead = 0.0
        own = self.of(priority_class)
        for members in self.classes:
            if members is own:
                break
            ahead += members.tokens
        return ahead + own.tokens_ahead(tenant)

    # Coming and leaving.

    def push(self, entry: Entry, now: float) -> None:
        """``entry``, with a new number, begins to wait."""
        if self._counts is not None:
            self._count(entry, 1)
        self._of[entry.task.priority_class].push(entry, now)

    def take(self, entry: Entry, now: float) -> None:
        """``entry`` goes to a worker."""
        self.handed_out += entry.tokens
        if self._counts is not None:
            self._count(entry, -1)
        self._of[entry.task.priority_class].take(entry, now)

    def forget(self, entry: Entry) -> None:
        """``entry`` waits no more, and goes nowhere."""
        if self._counts is not None:
            self._count(entry, -1)
        self._of[entry.task.priority_class].forget(entry)

    def pop_expired(self, now: float) -> Sequence[Entry]:
        """Tasks whose deadline has passed; they wait no more."""
        expired: list[Entry] = []
        for members in self.classes:
            expired.extend(members.due(now))
        for entry in expired:
            self.forget(entry)
        return expired

    def _count(self, entry: Entry, tasks: int) -> None:
        assert self._counts is not None
        count = self._counts[entry.task.priority_class]
        count.tasks += tasks
        count.tokens += tasks * entry.tokens

    # Whose turn it is.

    def turns(self, now: float) -> Sequence[Turn]:
        """Classes in the order in which they may send: the longest overdue before all, then by rank."""
        overdue: list[tuple[float, Turn]] = []
        ranked: list[Turn] = []
        modest_until = -math.inf
        for members, aging_s, turn, modest, before_all in self._places:
            if members.waiting:
                ranked.append(modest if now < modest_until else turn)
                if members.passed_since + aging_s <= now:
                    overdue.append((members.passed_since + aging_s, before_all))
            if members.seen_at + self._spare_s > modest_until:
                modest_until = members.seen_at + self._spare_s
        if overdue:
            overdue.sort(key=_overdue_at)
            return [turn for _, turn in overdue] + ranked
        return ranked

    def spares_until(self, members: WaitingClass) -> float:
        """Until when the class leaves room, if no task of a more urgent one comes."""
        more_urgent = self.classes[: self.classes.index(members)]
        seen_at = max((other.seen_at for other in more_urgent), default=-math.inf)
        return seen_at + self._spare_s

    def next_deadline(self) -> float:
        """When the next task expires; infinite: none."""
        return min(members.next_deadline() for members in self.classes)


def _place(members: WaitingClass, aging_rows: int) -> _Place:
    own = members.policy
    is_less = own.spare_rows > 0 or own.prefill_s_max < math.inf
    return _Place(
        members,
        own.aging_s,
        turn=Turn(members, math.inf, False, 0, math.inf, False),
        modest=Turn(members, math.inf, False, own.spare_rows, own.prefill_s_max, is_less),
        overdue=Turn(members, aging_rows, True, 0, math.inf, False),
    )


def _overdue_at(overdue: tuple[float, Turn]) -> float:
    return overdue[0]
