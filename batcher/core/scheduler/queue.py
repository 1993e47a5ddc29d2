"""The queue of one model's tasks: add, hand out in batches, finish. The package's docstring has the rules."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.estimates import HandoutRate, OutputLengths
from batcher.core.scheduler.feed import Feeder
from batcher.core.scheduler.padded import PaddedBatches
from batcher.core.scheduler.task import Decision, QueuedTask
from sluice.internal.v1 import control_pb2
from sluice.settings.batching import Policy

NOBODY: Final = ""
"""A tenant that has nothing waiting: no task is of it."""
TENANTS_REPORTED: Final = 64
"""Tenants of a class whose expected wait is reported: those with the most waiting."""


class Queue:
    """Tasks of one model: those that wait, and those handed out until `finish`.

    Attributes:
        order: those that wait; read-only for others.
        rate: at which they are handed out.
    """

    order: Feeder | PaddedBatches

    def __init__(self, policy: Policy, weights: Mapping[str, float] | None = None) -> None:
        """``weights`` of tenants that differ from 1."""
        self._tasks: dict[str, QueuedTask] = {}
        self.rate = HandoutRate()
        self._lengths = OutputLengths(policy.output_quantile)
        self._use(policy, weights or {})

    def __len__(self) -> int:
        """Tasks that wait."""
        return self.order.waiting

    # The life cycle of a task.

    def add(self, task: QueuedTask, now: float) -> None:
        """Takes a task that the queue does not hold."""
        held = self._tasks.setdefault(task.request_id, task)
        assert held is task, task.request_id
        if not self.order.waiting:
            self.rate.pause()
        self.order.add(task, now)

    def cancel(self, request_id: str) -> None:
        """Removes a task, waiting or handed out; unknown ones are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is None:
            return
        if task.number:
            self.order.cancel(task)
        else:
            self._landed(task, None)

    def finish(
        self, request_id: str, output_tokens: int, now: float, *, whole: bool = True
    ) -> None:
        """Removes a task that was handed out and needs no worker any more.

        Args:
            output_tokens: of the whole answer, tokens that existed when the task came included.
            whole: the answer ended by itself: estimates learn from it.
        """
        task = self._tasks.pop(request_id)
        assert not task.number, request_id
        members = self.order.classes[task.priority_class]
        members.charge(task, task.prompt_tokens + output_tokens)
        if whole:
            members.served(now - task.sent_at)
            self._lengths.observe(task, output_tokens)
        self._landed(task, now if whole else None)

    def reconfigure(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Continues under another policy: tasks keep waiting times and workers; fair shares restart from zero."""
        before = self.order
        self._lengths.quantile = policy.output_quantile
        self._use(policy, weights)
        for name, members in before.classes.items():
            self.order.classes[name].service_s = members.service_s
        waiting = [task for task in self._tasks.values() if task.number]
        for task in sorted(waiting, key=lambda task: task.number):
            self.order.add(task, task.waiting_since)
        for task in self._tasks.values():
            if not task.number:
                self.order.classes[task.priority_class].adopt(task)

    def _use(self, policy: Policy, weights: Mapping[str, float]) -> None:
        kind = PaddedBatches if policy.computes_whole else Feeder
        self.order = kind(policy, weights, self._lengths.estimate)

    def _landed(self, task: QueuedTask, now: float | None) -> None:
        if isinstance(self.order, PaddedBatches) and task.batch is not None:
            self.order.landed(task.batch, now)

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
        formed = self.order.form(now, capacities)
        rows = formed.batch.rows if formed.batch else ()
        self.rate.decided(sum([row.cost_tokens for row in rows]), self.order.waiting, now)
        return formed

    # Waiting tasks and expected waits.

    def waiting_by_class(self) -> Sequence[int]:
        """Tasks that wait, by class, most urgent first."""
        return [members.waiting for members in self.order.classes.values()]

    def expected_wait(self, priority_class: str, now: float, tenant: str = "default") -> float:
        """The expected wait of a new task, seconds; 0 also when it is not known."""
        rate = self.rate.tokens_per_s
        if not rate:
            return 0.0
        return self.order.tokens_before(priority_class, tenant) / rate

    def class_reports(self, now: float, closed_s: float = 0.0) -> Iterator[control_pb2.ClassReport]:
        """The state of each class, most urgent first, with the expected wait of a new task.

        ``closed_s``: how long all workers will compute nothing.
        """
        for name, members in self.order.classes.items():
            wait_s = self.expected_wait(name, now, NOBODY)
            waits_s = {
                tenant: self.expected_wait(name, now, tenant)
                for tenant in members.busiest(TENANTS_REPORTED)
            }
            yield control_pb2.ClassReport(
                priority_class=name,
                queued=members.waiting,
                queued_tokens=members.tokens,
                expected_wait_ms=(closed_s + wait_s) * 1e3,
                service_ms=members.service_s * 1e3,
                tenant_wait_ms={
                    one: 1e3 * (closed_s + s) for one, s in waits_s.items() if s > wait_s
                },
            )
