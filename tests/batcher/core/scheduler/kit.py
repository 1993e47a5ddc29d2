"""Tasks, a busy worker and the next batch, for tests of what is handed out."""

from itertools import count

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.queue import Queue
from batcher.core.scheduler.task import Batch, QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS

NUMBERS = count()


def order_key(order: Order, policy: Policy, task: QueuedTask, now: float) -> tuple[float, ...]:
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
    if is_near and tenant.time - policy.urgent_lead_tokens / tenant.weight <= members._time:
        return *of_class, 1, task.deadline, 0.0, task.number
    return *of_class, 2, tenant.time, task.due, task.number


def fill(
    queue: Queue,
    *prompts: int,
    priority_class: str = "interactive",
    now: float = 0.0,
    **values: object,
) -> list[str]:
    """Add tasks with prompts of so many tokens; return their names."""
    names = [f"t{next(NUMBERS)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        known = {"prompt_tokens": prompt, "max_tokens": 10, **values}
        queue.add(QueuedTask(name, priority_class, **known), now)  # type: ignore[arg-type]
    return names


def come_back(queue: Queue, row: QueuedTask, produced: int, now: float) -> QueuedTask:
    """A row that was handed out was lost, and its gateway sends it again."""
    queue.finish(row.request_id, produced, now, whole=False)
    again = QueuedTask(
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


def busy(free_rows: int = 8, **values: object) -> Capacity:
    return Capacity("w", free_rows, **{"running_rows": 8, **values})  # type: ignore[arg-type]


def batch_of(queue: Queue, now: float, replica: Capacity) -> Batch[QueuedTask]:
    batch = queue.next_batch(now, [replica]).batch
    assert batch is not None
    return batch
