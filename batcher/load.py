"""What gateways are told about a model: its workers and its classes."""

from collections.abc import Mapping

from batcher.core.scheduler.queue import Queue
from batcher.workers.fleet import Fleet
from sluice.internal.v1 import control_pb2


def model_report(
    model: str, fleet: Fleet, queue: Queue, backlog: Mapping[str, int], now: float
) -> control_pb2.ModelReport:
    """The state of one model; ``backlog`` are tasks by class that no batcher has taken."""
    return control_pb2.ModelReport(
        model=model,
        workers=fleet.live,
        slots=fleet.slots,
        running=fleet.running,
        queued=len(queue),
        classes=queue.class_reports(backlog, now),
        tokens_per_s=queue.tokens_per_s,
    )
