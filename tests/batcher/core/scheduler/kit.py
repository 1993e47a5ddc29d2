"""Tasks, a busy worker and the next batch, for tests of what is handed out."""

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import Batch, BatchLimit, QueueEntry
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS
from tests.support.settings import tuned

NUMBERS = count()
PRESSING: Final = ("came back", "deadline", "overdue")
"""Why a task presses."""
BULK_AGING_S: Final = 0.3
"""After this time a bulk task of `press` is overdue, seconds."""


def order_key(order: Order, policy: Policy, task: QueueEntry, now: float) -> tuple[float, ...]:
    """Return the key of the docstring of `batcher.core.scheduler.order`."""
    members, tenant = order.classes[task.priority_class], task.share
    overdue_at = members.passed_since + members.policy.aging_s
    rank = RANKS[task.priority_class]
    of_class: tuple[float, ...] = (
        (0.0, overdue_at, rank) if overdue_at <= now else (1.0, rank, rank)
    )
    if policy.order == "arrival":
        of_class = ()
    if task.returned:
        return *of_class, 0, task.deadline, 0.0, task.number
    if policy.order != "fair":
        return *of_class, 1, task.number
    is_near = task.deadline <= now + policy.urgency * members.service_s
    if (
        is_near
        and tenant.virtual_time - policy.urgent_lead_tokens / tenant.weight
        <= members.tenants.virtual_time
    ):
        return *of_class, 1, task.deadline, 0.0, task.number
    return *of_class, 2, tenant.virtual_time, task.due, task.number


def fill(
    queue: Queue,
    *prompts: int,
    priority_class: str = "interactive",
    now: float = 0.0,
    **values: object,
) -> list[QueueEntry]:
    """Add requests with prompts of so many tokens."""
    entries = []
    for prompt in prompts:
        known: dict[str, Any] = {"prompt_tokens": prompt, "max_tokens": 10, **values}
        entries.append(QueueEntry(f"t{next(NUMBERS)}", priority_class, **known))
        queue.add(entries[-1], now)
    return entries


def come_back(queue: Queue, row: QueueEntry, produced: int, now: float) -> QueueEntry:
    """A row that was handed out was lost, and its gateway sends it again."""
    queue.finish(row, produced, now, whole=False)
    again = QueueEntry(
        row.request_id,
        row.priority_class,
        row.deadline,
        tenant=row.tenant,
        workload=row.workload,
        prompt_tokens=row.prompt_tokens,
        max_tokens=row.max_tokens,
        produced_tokens=produced,
        prefix=row.prefix,
        returned=True,
        charged=row.charged,
    )
    queue.add(again, now)
    return again


def expected_wait_s(
    queue: Queue, name: str, now: float, capacities: Sequence[Capacity], tenant: str = ""
) -> float:
    """What a new request of the tenant is told to wait."""
    reports = queue.waits.class_reports(now, capacities)
    report = next(one for one in reports if one.priority_class == name)
    return report.tenant_wait_ms.get(tenant, report.expected_wait_ms) / 1e3


def return_bulk(queue: Queue, now: float) -> QueueEntry:
    """Hand out a bulk task, and let it come back."""
    fill(queue, 5, priority_class="bulk")
    (row,) = batch_of(queue, now, Capacity("w", 8)).entries
    return come_back(queue, row, 1, now)


def press(queue: Queue, why: str) -> float:
    """Let a bulk task press, for one of `PRESSING`; return the time from which it does."""
    if why == "came back":
        return_bulk(queue, 0.0)
        return 0.0
    learn(queue, "bulk", 1.0)
    due = 2.9 if why == "deadline" else math.inf
    fill(queue, 5, priority_class="bulk", now=1.0, deadline=due)
    return 1.0 if why == "deadline" else 1.0 + BULK_AGING_S


def learn(queue: Queue, priority_class: str, service_s: float) -> None:
    """Let an answer of the class take so long."""
    fill(queue, 5, priority_class=priority_class, now=-100.0)
    (row,) = batch_of(queue, -90.0, Capacity("w", 8)).entries
    queue.finish(row, 5, service_s - 90.0)


def limited_batch(policy: Policy, worker: Capacity) -> tuple[int, BatchLimit]:
    """The rows of the batch out of five tasks of 10 tokens, with as long answers, and why it is not larger."""
    queue = Queue(policy)
    fill(queue, *[10] * 5)
    batch = batch_of(queue, 1.0, worker)
    return len(batch.entries), batch.limit


def policy(name: str = "window", **values: object) -> Policy:
    return tuned(Policy, name=name, **values)


def busy(free_slots: int = 8, **values: object) -> Capacity:
    return Capacity("w", free_slots, **{"running": 8, **values})  # type: ignore[arg-type]


def batch_of(queue: Queue, now: float, replica: Capacity) -> Batch[QueueEntry]:
    batch = queue.next_batch(now, [replica]).batch
    assert batch is not None
    return batch
