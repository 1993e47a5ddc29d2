"""Waiting tasks of one class, and which of them is next.

What came back from a worker goes first. Then what is urgent, by deadline: its time left is below a multiple of what
answers of the class take, and its tenant is not too far ahead of its share. Then it is the tenant's turn that was given
least, and its task with the earliest deadline; a deadline beyond the horizon counts as lying at the horizon, so that
nobody waits behind all who came much later.

Where lengths matter there is a lane for every length bucket, and their number, logarithmic in the longest prompt,
does not grow with the number of tasks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from batcher.core.queue.accounts import Account, Accounts
from batcher.core.queue.entries import STALE_MIN, Entry, Records
from batcher.core.queue.lanes import Lane
from batcher.core.queue.lengths import OutputLengths
from batcher.core.tasks import QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS

SERVICE_SHARE: Final = 0.1
"""Weight of the newest answer in what answers take."""


class WaitingClass:
    """Tasks of one class that wait.

    Attributes:
        rank: 0 is the most urgent.
        policy: what the class is promised.
        waiting: how many.
        tokens: of them, prompt and expected answer.
        prefill_tokens: what a worker would have to compute before their next tokens.
        passed_since: when one of them went last, or since when there are some.
        seen_at: when the last one came.
        service_s: what answers of the class take; 0: not known.
        lanes: by length; a single one where lengths make no difference.
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
        self.accounts = Accounts(weights)
        self.lanes: dict[int, Lane] = {}
        self._lengths = lengths
        self._by_deadline = policy.by_deadline
        self._urgency = policy.urgency
        self._urgent_s = 0.0 if policy.by_deadline else -math.inf
        self._urgent_lead_tokens = policy.urgent_lead_tokens
        self._horizon_s = policy.horizon_s
        self._lane_width = math.log(policy.bucket_ratio)
        self._only_lane = None if policy.pads else self._open_lane(0)
        self._returned = Records()
        self._some_returned = False
        self._deadlines = Records()
        self._passed_over = Records()
        self._left_early = 0

    # Coming and leaving.

    def push(self, entry: Entry, now: float) -> None:
        """``entry``, with a new number, begins to wait."""
        if not self.waiting:
            self.passed_since = now
        self.seen_at = now
        self.waiting += 1
        self.tokens += entry.tokens
        self.prefill_tokens += entry.prefill
        task = entry.task
        entry.account = account = self.accounts.of(task.tenant)
        if not account.waiting:
            self.accounts.enters(account)
        account.waiting += 1
        account.tokens += entry.tokens
        if task.deadline != math.inf:
            self._deadlines.push((task.deadline, entry.number, entry))
        if entry.returned:
            self._some_returned = True
            self._returned.push((task.deadline, entry.number, entry))
        entry.order = -math.inf if entry.returned else self._order(task, now)
        entry.lane = lane = self._only_lane or self._lane(entry.prefill)
        lane.push(entry)

    def take(self, entry: Entry, now: float) -> None:
        """``entry`` goes to a worker; its tenant is charged what it is expected to cost."""
        self._leave(entry)
        if entry.guessed:
            self._lengths.estimate(entry)
        entry.account.charge(entry, entry.tokens)
        self.passed_since = now

    def forget(self, entry: Entry) -> None:
        """``entry`` waits no more, and goes nowhere."""
        self._leave(entry)
        self._left_early += 1
        if self._left_early > 2 * self.waiting + STALE_MIN:
            self._clean()

    def settle(self, entry: Entry, tokens: int) -> None:
        """``entry`` cost its tenant ``tokens``, it turned out."""
        before = entry.account.time
        entry.account.charge(entry, tokens)
        if entry.account.time < before:
            entry.lane.moved_back(entry.account)

    def served(self, service_s: float) -> None:
        """An answer took this long."""
        known = self.service_s
        self.service_s = known + (service_s - known) * (SERVICE_SHARE if known else 1.0)
        if self._by_deadline:
            self._urgent_s = self._urgency * self.service_s

    def due(self, now: float) -> Sequence[Entry]:
        """Tasks whose deadline has passed, each of them once; the caller makes them leave."""
        self._deadlines.tidy(self.waiting)
        if self._deadlines.earliest > now and self._passed_over.earliest > now:
            return ()
        found = []
        for records in (self._deadlines, self._passed_over):
            while (record := records.pop_until(now)) is not None:
                found.append(record[2])
        return found

    def _leave(self, entry: Entry) -> None:
        entry.number = 0
        self.waiting -= 1
        self.tokens -= entry.tokens
        self.prefill_tokens -= entry.prefill
        entry.lane.waiting -= 1
        account = entry.account
        account.waiting -= 1
        account.tokens -= entry.tokens
        if not account.waiting:
            self.accounts.leaves(account)

    # Whose turn it is.

    def head(self, now: float) -> Entry | None:
        """Who goes next."""
        if self._some_returned:
            record = self._returned.first()
            if record is not None:
                return record[2]
            self._some_returned = False
        if self._deadlines.earliest <= now + self._urgent_s:
            urgent = self._urgent(now + self._urgent_s)
            if urgent is not None:
                return urgent
        entry = self._only_lane.head() if self._only_lane is not None else self._first_of_lanes()
        if entry is not None:
            self.accounts.time = entry.account.time
        return entry

    def is_pressing(self, entry: Entry, now: float) -> bool:
        """Whether ``entry`` shall not wait for company."""
        return entry.returned or entry.task.deadline <= now + self._urgent_s

    def next_deadline(self) -> float:
        """When the next task expires; infinite: none."""
        firsts = (self._deadlines.first(), self._passed_over.first())
        return min((record[0] for record in firsts if record is not None), default=math.inf)

    def tokens_ahead(self, tenant: str) -> float:
        """Tokens that would be handed out before a new task of the tenant."""
        account = self.accounts.known(tenant)
        own = account.tokens if account is not None else 0
        weight = self.accounts.weight_of(tenant)
        others = self.accounts.weight - (weight if own else 0.0)
        return min(self.tokens, own * (1.0 + others / weight))

    def lanes_around(self, prefill: int) -> list[tuple[int, Lane]]:
        """Lanes that are not empty, nearest to a length first: -1 below it, 0 its own, 1 above."""
        own = self._lane_number(prefill)
        near = sorted(
            (abs(number - own), number, lane) for number, lane in self.lanes.items() if lane.waiting
        )
        return [((number > own) - (number < own), lane) for _, number, lane in near]

    def _lane_number(self, prefill: int) -> int:
        return int(math.log(max(prefill, 1)) / self._lane_width)

    def _lane(self, prefill: int) -> Lane:
        number = self._lane_number(prefill)
        lane = self.lanes.get(number)
        return lane if lane is not None else self._open_lane(number)

    def _open_lane(self, number: int) -> Lane:
        lane = self.lanes[number] = Lane()
        return lane

    def _order(self, task: QueuedTask, since: float) -> float:
        if not self._by_deadline:
            return 0.0  # The number decides.
        horizon = since + self._horizon_s
        return task.deadline if task.deadline < horizon else horizon

    def _urgent(self, until: float) -> Entry | None:
        deadlines = self._deadlines
        while (record := deadlines.first()) is not None and record[0] <= until:
            if not self._is_ahead(record[2].account):
                return record[2]
            deadlines.pop_until(until)
            self._passed_over.push(record)
        return None

    def _is_ahead(self, account: Account) -> bool:
        lead = (account.time - self.accounts.time) * account.weight
        return lead > self._urgent_lead_tokens

    def _first_of_lanes(self) -> Entry | None:
        heads = [head for lane in self.lanes.values() if (head := lane.head()) is not None]
        return min(heads, key=_turn, default=None)

    def _clean(self) -> None:
        self._left_early = 0
        for records in (self._returned, self._deadlines, self._passed_over):
            records.clean()
        for lane in self.lanes.values():
            lane.clean()


def _turn(entry: Entry) -> tuple[float, float, int]:
    return entry.account.time, entry.order, entry.number
