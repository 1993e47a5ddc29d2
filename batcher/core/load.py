"""What a new task of each class would have to expect, as gateways are told."""

from collections.abc import Iterator, Mapping

from batcher.core.queue import Queue
from sluice.internal.v1 import control_pb2
from sluice.wire.subjects import CLASSES


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
