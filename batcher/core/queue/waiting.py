"""All tasks that wait, by class, and the order in which classes have their turn."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from batcher.core.queue.classes import WaitingClass
from batcher.core.queue.entries import Entry
from batcher.core.queue.lengths import OutputLengths
from sluice.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS


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


class Waiting:
    """Tasks that wait.

    Attributes:
        count: how many.
        tokens: what a worker would have to compute before their next tokens.
        handed_out: tokens, prompt and expected answer, of all tasks that were ever taken.
        classes: the most urgent first; a single one where classes make no difference.
    """

    def __init__(
        self, policy: Policy, weights: Mapping[str, float], lengths: OutputLengths
    ) -> None:
        self._lengths = lengths
        self._policy = policy
        names = CLASSES if policy.by_class else CLASSES[:1]
        shares = weights if policy.by_tenant else None
        self.classes = tuple(WaitingClass(policy, name, shares) for name in names)
        self.count = 0
        self.tokens = 0
        self.handed_out = 0
        self._counts = [0 for _ in CLASSES]
        self._tokens = [0 for _ in CLASSES]
        self._by_class = policy.by_class

    def of(self, priority_class: str) -> WaitingClass:
        """Where tasks of the class wait."""
        return self.classes[RANKS[priority_class] if self._by_class else 0]

    def count_of(self, priority_class: str) -> int:
        """Tasks of one class."""
        return self._counts[RANKS[priority_class]]

    def tokens_of(self, priority_class: str) -> int:
        """Their prompts and expected answers."""
        return self._tokens[RANKS[priority_class]]

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
        rank = RANKS[entry.task.priority_class]
        self.count += 1
        self.tokens += entry.prefill
        self._counts[rank] += 1
        self._tokens[rank] += entry.tokens
        self.classes[rank if self._by_class else 0].push(entry, now)

    def take(self, entry: Entry, now: float) -> None:
        """``entry`` goes to a worker."""
        self.handed_out += entry.tokens
        members = self._leave(entry)
        members.leave(entry)
        self._lengths.estimate_again(entry)
        members.charge(entry, now)

    def forget(self, entry: Entry) -> None:
        """``entry`` waits no more, and goes nowhere."""
        self._leave(entry).forget(entry)

    def pop_expired(self, now: float) -> Iterator[Entry]:
        """Tasks whose deadline has passed; they wait no more."""
        for members in self.classes:
            for entry in members.due(now):
                self.forget(entry)
                yield entry

    def _leave(self, entry: Entry) -> WaitingClass:
        rank = RANKS[entry.task.priority_class]
        self.count -= 1
        self.tokens -= entry.prefill
        self._counts[rank] -= 1
        self._tokens[rank] -= entry.tokens
        return self.classes[rank if self._by_class else 0]

    # Whose turn it is.

    def turns(self, now: float) -> Sequence[Turn]:
        """Classes in the order in which they may send: the longest overdue before all, then by rank."""
        overdue: list[tuple[float, Turn]] = []
        ranked: list[Turn] = []
        seen_at = -math.inf
        for members in self.classes:
            if members.waiting:
                is_modest = now < seen_at + self._policy.spare_s
                ranked.append(self._turn(members, is_modest))
                if members.overdue_at <= now:
                    turn = Turn(members, self._policy.aging_rows, True, 0, math.inf, False)
                    overdue.append((members.overdue_at, turn))
            seen_at = max(seen_at, members.seen_at)
        if overdue:
            overdue.sort(key=_overdue_at)
            return [turn for _, turn in overdue] + ranked
        return ranked

    def _turn(self, members: WaitingClass, is_modest: bool) -> Turn:
        if not is_modest:
            return Turn(members, math.inf, False, 0, math.inf, False)
        own = members.policy
        is_less = own.spare_rows > 0 or own.prefill_s_max < math.inf
        return Turn(members, math.inf, False, own.spare_rows, own.prefill_s_max, is_less)

    def spares_until(self, members: WaitingClass) -> float:
        """Until when the class leaves room, if no task of a more urgent one comes."""
        more_urgent = self.classes[: self.classes.index(members)]
        seen_at = max((other.seen_at for other in more_urgent), default=-math.inf)
        return seen_at + self._policy.spare_s

    def next_deadline(self) -> float:
        """When the next task expires; infinite: none."""
        return min(members.next_deadline() for members in self.classes)


def _overdue_at(overdue: tuple[float, Turn]) -> float:
    return overdue[0]
