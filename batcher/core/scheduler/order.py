"""The order of waiting tasks: the one with the smallest key is next. Parts of the key, the most significant first:

1. The class. Overdue classes come first, the longest overdue before the others: tasks of it wait, and none was sent for
   its `aging_s`. Then interactive, standard, bulk. (`Waiting.quotas`)
2. Tasks that returned from a worker, by deadline.
3. Urgent tasks, by deadline: the time left is below `urgency` times the service time of the class, and the tenant is no
   more than `urgent_lead_tokens` ahead of its fair share.
4. The tenant's virtual time: first the tenant that was given the fewest tokens for its weight.
5. The deadline, at most `horizon_s` after the arrival, so that no task waits behind all that came much later.
6. Its number: the order of arrival.

`sort_key` is 2 to 6. It is never computed for all tasks: the structures of `fair_share` give the first of each kind.
A switch of the policy (`by_class`, `by_deadline`, `by_tenant`) that is off makes its part equal for all tasks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sortedcontainers import SortedList

from batcher.core.scheduler.estimates import OutputLengths
from batcher.core.scheduler.fair_share import Deadlines, FairShares, LengthBucket
from batcher.core.scheduler.task import QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS

SERVICE_SHARE: Final = 0.1
"""Weight of the newest answer in the mean service time."""


def sort_key(task: QueuedTask, *, is_urgent: bool) -> tuple[int, float, float, int]:
    """The sort key of ``task`` in its class; the smallest is first."""
    if task.returned:
        return 0, task.deadline, 0.0, task.number
    if is_urgent:
        return 1, task.deadline, 0.0, task.number
    return 2, task.share.time, task.due, task.number


class WaitingClass:
    """Tasks of one class that wait.

    Attributes:
        rank: 0 is the most urgent.
        waiting: how many.
        tokens: of them, prompt and expected answer.
        prefill_tokens: tokens that a worker would have to compute before their next tokens.
        passed_since: when one of them was sent last, or since when some wait.
        seen_at: when the last one came.
        service_s: service time of answers of the class; 0: not known.
        buckets: by length; a single one where lengths make no difference.
    """

    def __init__(
        self,
        policy: Policy,
        name: str,
        weights: Mapping[str, float] | None,
        lengths: OutputLengths,
    ) -> None:
        self.rank = RANKS[name]
        self.policy = policy.of_class(name)
        self.waiting = 0
        self.tokens = 0
        self.prefill_tokens = 0
        self.passed_since = 0.0
        self.seen_at = -math.inf
        self.service_s = 0.0
        self.shares = FairShares(weights)
        self.buckets: dict[int, LengthBucket] = {}
        self._lengths = lengths
        self._by_deadline = policy.by_deadline
        self._urgency = policy.urgency
        self._urgent_s = 0.0 if policy.by_deadline else -math.inf
        self._urgent_lead_tokens = policy.urgent_lead_tokens
        self._horizon_s = policy.horizon_s
        self._bucket_width = math.log(policy.bucket_ratio) if policy.pads else math.inf
        self._only_bucket = None if policy.pads else self.buckets.setdefault(0, LengthBucket())
        self._returned: SortedList[tuple[float, int, QueuedTask]] = SortedList()
        self._deadlines = Deadlines()
        self._passed_over = Deadlines()

    # Adding and removing.

    def add(self, task: QueuedTask, now: float) -> None:
        """``task``, with a new number, begins to wait."""
        if not self.waiting:
            self.passed_since = now
        self.seen_at = now
        self.waiting += 1
        self.tokens += task.cost_tokens
        self.prefill_tokens += task.prefill_tokens
        self.shares.add(task)
        if task.deadline != math.inf:
            self._deadlines.add(task, self.waiting)
        if task.returned:
            self._returned.add((task.deadline, task.number, task))
        task.due = self._due(task, now)
        bucket = self._only_bucket
        if bucket is None:
            task.bucket = self._bucket_of(task.prefill_tokens)
            bucket = self.buckets.get(task.bucket)
            if bucket is None:
                bucket = self.buckets[task.bucket] = LengthBucket()
        else:
            task.bucket = 0
        bucket.add(task)

    def remove(self, task: QueuedTask) -> None:
        """``task`` waits no more."""
        self.waiting -= 1
        self.tokens -= task.cost_tokens
        self.prefill_tokens -= task.prefill_tokens
        self.shares.remove(task)
        (self._only_bucket or self.buckets[task.bucket]).remove(task)
        if task.returned:
            self._returned.remove((task.deadline, task.number, task))
        task.number = 0

    def take(self, task: QueuedTask, now: float) -> None:
        """``task`` is sent to a worker; its tenant is charged the expected cost."""
        self.remove(task)
        if task.guessed:
            self._lengths.estimate(task)
        task.charge(task.cost_tokens)
        self.passed_since = now

    def settle(self, task: QueuedTask, tokens: int) -> None:
        """Corrects the charge of ``task`` to its actual cost, ``tokens``."""
        before = task.share.time
        task.charge(tokens)
        bucket = self.buckets.get(task.bucket)
        if task.share.time < before and bucket is not None:
            bucket.moved_back(task.share)

    def served(self, service_s: float) -> None:
        """Adds the service time of an answer."""
        known = self.service_s
        self.service_s = known + (service_s - known) * (SERVICE_SHARE if known else 1.0)
        if self._by_deadline:
            self._urgent_s = self._urgency * self.service_s

    def late(self, now: float) -> Sequence[QueuedTask]:
        """Tasks whose deadline has passed, each once; the caller removes them."""
        if self._deadlines.earliest > now and self._passed_over.earliest > now:
            return ()
        found = []
        for deadlines in (self._deadlines, self._passed_over):
            while (task := deadlines.pop(now)) is not None:
                found.append(task)
        return found

    # The next task.

    def pass_over(self, now: float) -> None:
        """Ends the urgency of what is first while its tenant is too far ahead. `head` counts on it."""
        if self._deadlines.earliest > now + self._urgent_s:
            return
        while (task := self._first_urgent(now)) is not None:
            if self.shares.lead_tokens(task.share) <= self._urgent_lead_tokens:
                return
            self._deadlines.pop(task.deadline)
            self._passed_over.add(task, self.waiting)

    def start_turn(self, task: QueuedTask, now: float) -> None:
        """``task``, the head, goes: virtual time moves on to its tenant's, unless it goes out of turn."""
        if task.returned:
            return
        if self._deadlines.earliest > now + self._urgent_s or task is not self._first_urgent(now):
            self.shares.time = task.share.time

    def head(self, now: float) -> QueuedTask | None:
        """The task with the least `sort_key`."""
        if self._returned:
            return self._returned[0][2]
        if self._deadlines.earliest <= now + self._urgent_s:
            urgent = self._first_urgent(now)
            if urgent is not None:
                return urgent
        if self._only_bucket is not None:
            return self._only_bucket.head()
        heads = [head for b in self.buckets.values() if (head := b.head()) is not None]
        return min(heads, key=lambda task: sort_key(task, is_urgent=False), default=None)

    def is_pressing(self, task: QueuedTask, now: float) -> bool:
        """Whether ``task`` must not wait for more rows."""
        return task.returned or task.deadline <= now + self._urgent_s

    def next_deadline(self) -> float:
        """When the next task expires; infinite: none."""
        firsts = (self._deadlines.first(), self._passed_over.first())
        return min((task.deadline for task in firsts if task is not None), default=math.inf)

    def tokens_before(self, tenant: str) -> float:
        """Tokens that would be handed out before a new task of the tenant."""
        return min(self.tokens, self.shares.tokens_before(tenant))

    def buckets_around(self, prefill_tokens: int) -> list[tuple[int, LengthBucket]]:
        """Buckets that are not empty, nearest to a length first: -1 below it, 0 its own, 1 above."""
        own = self._bucket_of(prefill_tokens)
        near = sorted((abs(n - own), n) for n, bucket in self.buckets.items() if bucket.waiting)
        return [((n > own) - (n < own), self.buckets[n]) for _, n in near]

    def _bucket_of(self, prefill_tokens: int) -> int:
        return int(math.log(max(prefill_tokens, 1)) / self._bucket_width)

    def _due(self, task: QueuedTask, now: float) -> float:
        if task.returned:
            return -math.inf
        return min(task.deadline, now + self._horizon_s) if self._by_deadline else 0.0

    def _first_urgent(self, now: float) -> QueuedTask | None:
        task = self._deadlines.first()
        return task if task is not None and task.deadline <= now + self._urgent_s else None


class ClassQuota(NamedTuple):
    """How much a class may send now."""

    members: WaitingClass
    rows: float
    overdue: bool
    """Out of its rank, because it has waited too long."""
    spare_rows: int
    """Rows of a worker that it leaves free."""
    is_modest: bool
    """It leaves rows free for the sake of more urgent classes."""


class _Count:
    """Tasks of one class where all classes wait together."""

    waiting = 0
    tokens = 0

    def add(self, task: QueuedTask, tasks: int) -> None:
        self.waiting += tasks
        self.tokens += tasks * task.cost_tokens


class Waiting:
    """All tasks that wait, and the order in which classes send.

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
        self._policy = policy
        self._of = {name: self.classes[min(RANKS[name], len(names) - 1)] for name in CLASSES}
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
        return (self._counts or self._of)[priority_class].waiting

    def tokens_of(self, priority_class: str) -> int:
        """Their prompts and expected answers."""
        return (self._counts or self._of)[priority_class].tokens

    def tokens_before(self, priority_class: str, tenant: str) -> float:
        """Tokens, prompt and expected answer, that go before a new task of the class and tenant."""
        own = self.of(priority_class)
        more_urgent = self.classes[: self.classes.index(own)]
        return sum(members.tokens for members in more_urgent) + own.tokens_before(tenant)

    # Adding and removing.

    def add(self, task: QueuedTask, now: float) -> None:
        """``task``, with a new number, begins to wait."""
        if self._counts is not None:
            self._counts[task.priority_class].add(task, 1)
        self._of[task.priority_class].add(task, now)

    def take(self, task: QueuedTask, now: float) -> None:
        """``task`` goes to a worker."""
        self.handed_out += task.cost_tokens
        if self._counts is not None:
            self._counts[task.priority_class].add(task, -1)
        self._of[task.priority_class].take(task, now)

    def remove(self, task: QueuedTask) -> None:
        """Removes ``task`` without sending it."""
        if self._counts is not None:
            self._counts[task.priority_class].add(task, -1)
        self._of[task.priority_class].remove(task)

    def pop_expired(self, now: float) -> Sequence[QueuedTask]:
        """Removes and returns the tasks whose deadline has passed."""
        expired: list[QueuedTask] = []
        for members in self.classes:
            expired.extend(members.late(now))
        for task in expired:
            self.remove(task)
        return expired

    # The order of classes.

    def quotas(self, now: float) -> Sequence[ClassQuota]:
        """Classes with tasks in the order in which they may send: the longest overdue before all, then by rank."""
        overdue: list[tuple[float, ClassQuota]] = []
        ranked: list[ClassQuota] = []
        more_urgent_until = -math.inf
        for members in self.classes:
            if members.waiting:
                ranked.append(_quota(members, is_modest=now < more_urgent_until))
                overdue_at = members.passed_since + members.policy.aging_s
                if overdue_at <= now:
                    rows = self._policy.aging_rows
                    overdue.append((overdue_at, ClassQuota(members, rows, True, 0, False)))
            more_urgent_until = max(more_urgent_until, members.seen_at + self._policy.spare_s)
        overdue.sort(key=lambda each: each[0])
        return [quota for _, quota in overdue] + ranked

    def modest_until(self, members: WaitingClass) -> float:
        """Until when the class leaves room, if no task of a more urgent one comes."""
        more_urgent = self.classes[: self.classes.index(members)]
        seen_at = max((other.seen_at for other in more_urgent), default=-math.inf)
        return seen_at + self._policy.spare_s

    def next_deadline(self) -> float:
        """When the next task expires; infinite: none."""
        return min(members.next_deadline() for members in self.classes)


def _quota(members: WaitingClass, *, is_modest: bool) -> ClassQuota:
    own = members.policy
    if not is_modest:
        return ClassQuota(members, math.inf, False, 0, False)
    is_less = own.spare_rows > 0
    return ClassQuota(members, math.inf, False, own.spare_rows, is_less)
