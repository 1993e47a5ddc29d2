"""The room of a worker in a request table, for tests of what is sent to it."""

from batcher.core.requests import Requests
from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import RANKS


def grant(requests: Requests, worker: str, rows: int) -> None:
    """So many rows more may be sent to the worker, which is live then."""
    state = requests.workers.of(worker)
    state.live |= rows > 0
    state._report = worker_pb2.StepReport(task_grants=[state._sent_rows + rows] * len(RANKS))
