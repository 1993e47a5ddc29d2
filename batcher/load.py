"""What gateways are told about a model: its workers, and what a new task of each class would have to expect."""

from collections.abc import Iterator, Mapping

from batcher.core.queue import Queue
from batcher.workers.fleet import Fleet
from sluice.internal.v1 import control_pb2
from sluice.wire.subjects import CLASSES


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
        classes=class_reports(queue, backlog, now),
        tokens_per_s=queue.tokens_per_s,
    )


def class_reports(
    queue: Queue, backlog: Mapping[str, int], now: float
) -> Iterator[control_pb2.ClassReport]:
    """One report a class, most urgent first."""
    backlog_tokens = 0.0
    for name in CLASSES:
        waiting, tokens = queue.waiting(name), queue.waiting_tokens(name)
        # What is behind the tasks here is taken to be like them.
        backlog_tokens += backlog[name] * (tokens / waiting if waiting else 0.0)
        speed = queue.tokens_per_s
        behind_s = backlog_tokens / speed if speed else 0.0
        yield control_pb2.ClassReport(
            priority_class=name,
            queued=waiting,
            queued_tokens=tokens,
            expected_wait_ms=(queue.expected_wait(name, now) + behind_s) * 1e3,
            service_ms=queue.service_s(name) * 1e3,
            backlog=backlog[name],
        )
