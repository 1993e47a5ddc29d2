"""What must be true of every batch that a batcher forms, told by its effects alone."""

from collections.abc import Sequence

from batcher.core.effects import Effects, FormedBatch, Move
from batcher.core.row import Row, RowState
from batcher.core.scheduler.capacity import Capacity
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS


class Checks:
    """Follows the rows of one batcher."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.waiting: dict[str, dict[str, Row]] = {name: {} for name in CLASSES}
        self.served_at = dict.fromkeys(CLASSES, 0.0)

    def change_policy(self, policy: Policy) -> None:
        """A class waits as long as its oldest task."""
        self.policy = policy
        for name, rows in self.waiting.items():
            self.served_at[name] = min((row.since for row in rows.values()), default=0.0)

    def see(self, effects: Effects, capacities: Sequence[Capacity], now: float) -> None:
        """Checks the batches that were formed for ``capacities``, each when its first row goes."""
        known = {capacity.worker: capacity for capacity in capacities}
        first = {formed.rows[0].request_id: formed for formed in effects.batches}
        for move in effects.moves:
            formed = first.get(move.row.request_id) if move.after is RowState.SENT else None
            if formed is not None:
                worker = formed.batch.worker
                self.check_budgets(formed, self.seen(formed, known[worker]))
                self.check_turns(formed, now)
                known[worker] = known[worker].after(formed.batch)
            self.follow(move, now)

    def seen(self, formed: FormedBatch, capacity: Capacity) -> Capacity:
        """As the class of the batch sees it: less urgent rows give way where there is no room for the first row."""
        first = formed.batch.rows[0]
        waiting = capacity.waiting_tokens + first.prefill_tokens
        fits = capacity.free_rows > 0 and first.cache_tokens <= capacity.free_tokens
        fits = fits and (not capacity.waiting_tokens or waiting <= self.policy.waiting_tokens_max)
        if fits or capacity.idle or not (self.policy.takes_slots and self.policy.by_class):
            return capacity
        classes = {row.task.priority_class for row in formed.rows}
        assert len(classes) == 1
        return capacity.preemptible[RANKS[classes.pop()]]

    def follow(self, move: Move, now: float) -> None:
        name = move.row.task.priority_class
        if move.after is RowState.WAITING:
            if not self.waiting[name]:
                self.served_at[name] = now
            self.waiting[name][move.row.request_id] = move.row
        elif move.before is RowState.WAITING:
            del self.waiting[name][move.row.request_id]
            if move.after is RowState.SENT:
                self.served_at[name] = now

    def check_budgets(self, formed: FormedBatch, capacity: Capacity) -> None:
        batch, policy = formed.batch, self.policy
        count, alone = len(batch.rows), len(batch.rows) == 1
        assert [row.request_id for row in formed.rows] == [row.request_id for row in batch.rows]
        assert 0 < count <= min(policy.max_rows, capacity.free_rows)
        assert capacity.batches_in_flight < policy.batches_in_flight_max
        assert alone or batch.padding_share <= policy.padding_max + 1e-9
        assert alone or batch.tokens <= policy.batch_tokens_max
        if not alone or capacity.waiting_tokens:
            assert capacity.waiting_tokens + batch.tokens <= policy.waiting_tokens_max
        assert (alone and capacity.idle) or batch.cache_tokens <= capacity.free_tokens

    def check_turns(self, formed: FormedBatch, now: float) -> None:
        """While a class is overdue, only others that are overdue too go before it."""
        if not self.policy.by_class:
            return
        overdue = {
            name
            for name, rows in self.waiting.items()
            if rows and self.served_at[name] + self.policy.of_class(name).aging_s <= now
        }
        classes = [row.task.priority_class for row in formed.rows]
        if overdue:
            assert classes[0] in overdue, (overdue, classes)
        if not self.policy.pads:
            assert overdue <= set(classes) or set(classes) <= overdue, (overdue, classes)
