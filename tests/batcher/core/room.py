"""Capacity of a worker in a request table, for tests of what is sent to it."""

from batcher.core.requests import RequestTable
from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import RANKS


def grant(table: RequestTable, worker: str, slots: int) -> None:
    """Let a worker, which is live from now on, get this many more requests."""
    state = table.workers.state_of(worker)
    state.live |= slots > 0
    state.report = worker_pb2.StepReport(task_grants=[state.sent_requests + slots] * len(RANKS))
