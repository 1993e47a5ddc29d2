"""The queue of one model's tasks: add, hand out in batches, finish. The package's docstring has the rules."""

import math
from collections.abc import Mapping, Sequence

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.estimates import OutputLengths
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.placement import Placement
from batcher.core.scheduler.policy import BatchPolicy, ContinuousPolicy
from batcher.core.scheduler.static import StaticBatchPolicy
from batcher.core.scheduler.task import Decision, QueuedTask
from batcher.core.scheduler.waits import ExpectedWaits
from sluice.settings.batching import Policy


class Queue:
    """Tasks of one model: those that wait, and those handed out until `finish`.

    One `Order` decides who is next under every policy; the batch policy decides when a batch goes, and with whom.

    Attributes:
        order: those that wait; read-only for others.
        waits: what a new task would wait.
    """

    def __init__(self, policy: Policy, weights: Mapping[str, float] | None = None) -> None:
        """``weights`` of tenants that differ from 1."""
        self._tasks: dict[str, QueuedTask] = {}
        self._lengths = OutputLengths(policy.output_quantile)
        self.order = Order(policy, weights or {}, self._lengths.estimate)
        self._placement = Placement(policy, self.order)
        self._batching = self._new_batching(policy)
        self.waits = ExpectedWaits(self.order, policy, self.window_s)

    def __len__(self) -> int:
        """Tasks that wait."""
        return self.order.waiting

    # The life cycle of a task.

    def add(self, task: QueuedTask, now: float) -> None:
        """Takes a task that the queue does not hold."""
        held = self._tasks.setdefault(task.request_id, task)
        assert held is task, task.request_id
        self.order.add(task, now)
        self._batching.on_wait(task)

    def cancel(self, request_id: str) -> None:
        """Removes a task, waiting or handed out; unknown ones are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is None:
            return
        if task.number:
            self._batching.on_cancel(task)
            self.order.cancel(task)
        else:
            self._answered(task, None)
            self.waits.left(task)

    def first_token(self, request_id: str, now: float) -> None:
        """Take the news that a task that was handed out has its first token."""
        task = self._tasks.get(request_id)
        if task is not None and not task.number:
            self._answered(task, now)

    def finish(
        self,
        request_id: str,
        output_tokens: int,
        now: float,
        *,
        whole: bool = True,
        decode_s: float = 0.0,
    ) -> None:
        """Removes a task that was handed out and needs no worker any more.

        Args:
            output_tokens: of the whole answer, tokens that existed when the task came included.
            whole: the answer ended by itself: estimates learn from it.
            decode_s: seconds from the first of the new tokens to the last.
        """
        task = self._tasks.pop(request_id)
        assert not task.number, request_id
        members = self.order.classes[task.priority_class]
        members.charge(task, task.prompt_tokens + output_tokens)
        if whole:
            members.served(now - task.sent_at)
            self._lengths.observe(task, output_tokens)
            produced = task.prefill_tokens - task.prompt_tokens
            self.waits.measure(task, output_tokens - produced, decode_s, now)
        self._answered(task, now if whole else None)
        self.waits.left(task, now)

    def reconfigure(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Continue under another policy or other weights.

        Tasks keep their waiting times and workers, tenants what they are ahead or behind in their shares.
        """
        self._lengths.quantile = policy.output_quantile
        self.order.change(policy, weights)
        self._placement.change(policy)
        self.waits.change(policy)
        self._batching = self._new_batching(policy, self._batching)
        waiting = [task for task in self._tasks.values() if task.number]
        for task in sorted(waiting, key=lambda task: task.number):
            self._batching.on_wait(task)

    def _new_batching(self, policy: Policy, before: BatchPolicy | None = None) -> BatchPolicy:
        if policy.is_continuous:
            return ContinuousPolicy(policy, self.order, self._placement)
        return StaticBatchPolicy(policy, self.order, self._placement, before)

    def _answered(self, task: QueuedTask, now: float | None) -> None:
        """Count the first token or the end of a task; without ``now`` no latency is learned from it."""
        batch = task.batch
        if task.answered or batch is None:
            return
        task.answered = True
        batch.answered += 1
        if batch.answered == len(batch.rows) and now is not None:
            self._batching.on_answered(batch, now)

    def oldest(self) -> dict[str, float]:
        """Since when the oldest task of each class waits. Other threads may ask: `list` copies in one step."""
        found: dict[str, float] = {}
        for task in list(self._tasks.values()):
            if task.number and task.waiting_since < found.get(task.priority_class, math.inf):
                found[task.priority_class] = task.waiting_since
        return found

    # Decisions.

    def next_batch(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """Forms one batch for one of the live workers of the model, by their capacities.

        The caller has cancelled the tasks whose deadline has passed.
        """
        formed = self._batching.form(now, capacities)
        self.waits.decided(formed, now)
        return formed

    def window_s(self, priority_class: str, now: float) -> float:
        """Return how long the policy lets a new task of the class wait for others, at most; seconds."""
        return self._batching.window_s(priority_class, now)

    def waiting_by_class(self) -> Sequence[int]:
        """Tasks that wait, by class, most urgent first."""
        return [members.waiting for members in self.order.classes.values()]
