"""When a batch goes, to whom, and with which rows.

The first row is that of the first class in turn. There is no skipping: while it fits nowhere nothing goes, or small
tasks would keep a large one waiting for ever. It goes at once when it presses, when the worker would idle, or when the
batch is full; else it waits for company, but not longer than `wait_s`, nor than a share of what the worker leaves of
its class's target.

Where padding is limited the batch is filled from the first row's length bucket and then from its neighbours; and
while the first row may still wait, a bucket that is full goes before it.
"""

from collections.abc import Sequence

from batcher.core.batches import Batch, BatchCause, BatchLimit
from batcher.core.queue.classes import WaitingClass
from batcher.core.queue.concurrency import Concurrency, OpenBatch
from batcher.core.queue.entries import Entry
from batcher.core.queue.filling import Filling, FillingLimits
from batcher.core.queue.placement import Placement
from batcher.core.queue.waiting import Turn, Waiting
from batcher.core.replicas import Replica
from sluice.settings.batching import Policy


class Former:
    """Forms batches of what waits."""

    def __init__(self, policy: Policy, waiting: Waiting) -> None:
        self._policy = policy
        self._limits = FillingLimits.of(policy)
        self._waiting = waiting
        self._concurrency = Concurrency(policy)
        self._placement = Placement(policy, self._concurrency)

    def reconfigure(self, policy: Policy, waiting: Waiting) -> None:
        """Goes on under another policy, with what waits now."""
        self._policy = policy
        self._limits = FillingLimits.of(policy)
        self._waiting = waiting
        self._concurrency.reconfigure(policy)
        self._placement.reconfigure(policy)

    def form(self, now: float, replicas: Sequence[Replica]) -> Batch | float | None:
        """A batch, or when to ask again, or None: when something has changed."""
        turns = self._waiting.turns(now)
        if not turns:
            return None
        turn = turns[0]
        first = turn.members.head(now)
        assert first is not None
        replica = self._placement.choose(first, replicas, turn)
        if replica is None and (taken := self._taken(first, replicas, turn)) is not None:
            # Less urgent classes have no room in it.
            replica, turns = taken, turns[:1]
        if replica is None:
            return self._waiting.spares_until(turn.members) if turn.is_modest else None
        if self._limits.pads:
            return self._form_of_one_length(now, turns, first, replica)
        cause = self._cause(now, turn, first, replica)
        if not isinstance(cause, BatchCause):
            return cause
        filling = self._filling(replica, now)
        self._fill(filling, first, turns, now)
        return filling.batch(cause)

    def _taken(self, first: Entry, replicas: Sequence[Replica], turn: Turn) -> Replica | None:
        """A worker with room for ``first`` when less urgent rows give way, as it is then."""
        if not (self._policy.takes_slots and self._policy.by_class):
            return None
        seen = [replica.giving_way(turn.members.rank) for replica in replicas]
        return self._placement.choose(first, [one for one in seen if one is not None], turn)

    def landed(self, batch: OpenBatch, now: float | None) -> None:
        """A row of ``batch`` is with its worker no more; without ``now`` that tells nothing about latencies."""
        self._concurrency.row_ended(batch, now)

    # When.

    def _cause(self, now: float, turn: Turn, first: Entry, replica: Replica) -> BatchCause | float:
        """Why a batch goes now, or when it will."""
        if turn.overdue or turn.members.is_pressing(first, now):
            return BatchCause.URGENT
        if self._policy.sends_to_idle and replica.idle:
            return BatchCause.WORKER_IDLE
        enough = self._rows_max(replica, turn)
        if (
            self._waiting.count >= enough
            or self._waiting.prefill_tokens >= self._policy.batch_tokens_max
        ):
            return BatchCause.FULL
        due_at = min(
            members.passed_since + self._window_s(members, first, replica)
            for members in self._waiting.classes
            if members.waiting
        )
        return BatchCause.WINDOW_OVER if due_at <= now else due_at

    def _window_s(self, members: WaitingClass, first: Entry, replica: Replica) -> float:
        policy = self._policy
        if not policy.wait_adapts:
            return policy.wait_s
        left_s = members.policy.ttft_target_s - replica.first_token_s(first.prefill)
        return min(policy.wait_s, max(0.0, policy.wait_share * left_s))

    def _rows_max(self, replica: Replica, turn: Turn) -> int:
        return min(
            self._concurrency.max_rows, replica.free_rows - self._placement.spared(replica, turn)
        )

    def _narrow(self, filling: Filling, turn: Turn) -> None:
        replica = filling.replica
        free_rows = replica.free_rows - self._placement.spared(replica, turn)
        prefill_max = self._placement.prefill_max(replica, turn)
        filling.narrow(self._concurrency.max_rows, free_rows, prefill_max)

    # With which rows.

    def _filling(self, replica: Replica, now: float) -> Filling:
        return Filling(self._limits, replica, self._concurrency.open(replica.worker, now))

    def _fill(self, filling: Filling, first: Entry, turns: Sequence[Turn], now: float) -> None:
        """With ``first`` and who follows it, class by class."""
        self._take(filling, first, now)
        taken = 1
        for turn in turns:
            self._narrow(filling, turn)
            members, rows = turn.members, turn.rows - taken
            taken = 0
            while rows > 0 and members.waiting:
                if not filling.has_row():
                    return
                entry = members.head(now)
                assert entry is not None
                if not filling.takes(entry):
                    return
                self._take(filling, entry, now)
                rows -= 1

    def _take(self, filling: Filling, entry: Entry, now: float) -> None:
        self._waiting.take(entry, now)
        if entry.task.prefix:
            self._placement.sent(entry, filling.replica.worker)
        filling.put(entry, now)

    # Of about one length.

    def _form_of_one_length(
        self, now: float, turns: Sequence[Turn], first: Entry, replica: Replica
    ) -> Batch | float:
        turn = turns[0]
        due_at = first.since + self._window_s(turn.members, first, replica)
        cause = BatchCause.WINDOW_OVER
        if turn.overdue or turn.members.is_pressing(first, now):
            cause = BatchCause.URGENT
        elif now < due_at:
            full = self._first_of_full(turns, replica)
            if full is not None:
                cause, first = BatchCause.FULL, full
            elif self._policy.sends_to_idle and replica.idle:
                cause = BatchCause.WORKER_IDLE
            else:
                return due_at
        filling = self._filling(replica, now)
        self._fill_around(first, filling, turns, now)
        return filling.batch(cause)

    def _first_of_full(self, turns: Sequence[Turn], replica: Replica) -> Entry | None:
        """The first row of the first bucket that fills a batch."""
        for turn in turns:
            rows = self._rows_max(replica, turn)
            for lane in turn.members.lanes.values():
                entry = lane.head() if lane.waiting else None
                if entry is None:
                    continue
                cells = lane.waiting * entry.prefill
                if lane.waiting >= rows or cells >= self._policy.batch_tokens_max:
                    able = self._placement.choose(entry, [replica], turn)
                    if able is not None:
                        return entry
        return None

    def _fill_around(
        self, first: Entry, filling: Filling, turns: Sequence[Turn], now: float
    ) -> None:
        """From the bucket of ``first`` outwards, class by class."""
        self._take(filling, first, now)
        for turn in turns:
            self._narrow(filling, turn)
            rows = turn.rows
            closed = set[int]()
            for side, lane in turn.members.lanes_around(first.prefill):
                while rows > 0 and side not in closed:
                    entry = lane.head()
                    if entry is None:
                        break
                    if filling.has_row() and filling.takes(entry):
                        self._take(filling, entry, now)
                        rows -= 1
                    elif filling.limit is BatchLimit.PADDING:
                        closed.add(side)
                    else:
                        return
