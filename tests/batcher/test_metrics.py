"""What a batcher counts, and what it shows of its workers."""

import pytest
from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from batcher.core.queued_request import QueuedRequest
from batcher.core.requests import RequestTable
from batcher.metrics import BatcherMetrics
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.settings.batching import Policy
from sluice.telemetry import catalog
from sluice.telemetry.catalog import Metric
from sluice.telemetry.instruments import Instruments, Labels
from tests.batcher.core.room import grant

OF_CLASS = "echo", "bulk"
OF_WORKER = "echo", "w"
BUCKETS = len(catalog.STEP_SECONDS) + 1


class Scene:
    """A request table whose actions are counted."""

    def __init__(self) -> None:
        self.instruments = Instruments()
        self.metrics = BatcherMetrics(self.instruments)
        self.table = RequestTable("b", policy=Policy(max_rows=8))
        self.metrics.on_model("echo", ["w", "away"], self.table)
        self.report("one")
        self.advance()

    def report(self, worker: str, *frames: frame_pb2.Frame, tokens: int | None = None) -> None:
        counts = None
        if tokens is not None:
            counts = worker_pb2.WorkerCounts(
                step_buckets=[2] * BUCKETS,
                step_s=3.0,
                step_tasks=5,
                tokens=tokens,
                shortest_step_s=0.25,
                longest_step_s=0.5,
            )
        load = worker_pb2.WorkerLoad(
            slots=4, running=1, cache_blocks=8, free_blocks=6, preemptions=1
        )
        sequence = self.table.workers.state_of("w").next_sequence
        message = worker_pb2.StepReport(
            worker=worker, sequence=sequence, frames=frames, load=load, ready=True, counts=counts
        )
        self.table.on_report("w", message, 0.0)

    def add(self, name: str, attempt: int = 0) -> None:
        task = task_pb2.Task(
            request_id=name, gateway="g", model="echo", priority_class="bulk", attempt=attempt
        )
        task.prompt_token_ids.extend(range(4))
        self.table.add(QueuedRequest(task, 0.0, {}), 0.0)

    def advance(self, now: float = 0.0, room: int = 8) -> str:
        """Plays the loop once; returns the batch that was formed."""
        grant(self.table, "w", room)
        self.table.advance(now)
        actions = self.table.take()
        for row in actions.ended:
            self.metrics.on_ended(row)
        for formed in actions.batches:
            self.metrics.on_batch(formed, lambda _: INVALID_SPAN_CONTEXT)
        capacities = self.table.workers.capacities(self.table.workers.active(), now)
        classes = self.table.queue.waits.class_reports(now, capacities)
        report = control_pb2.ModelReport(model="echo", classes=classes)
        self.metrics.on_report(report)
        return actions.batches[0].batch_id if actions.batches else ""

    def read(self, metric: Metric) -> dict[Labels, float | HistogramDataPoint]:
        return {
            labels: value
            for found, points in self.instruments.collect()
            if found is metric
            for labels, value in points
        }


@pytest.fixture
def scene() -> Scene:
    return Scene()


def end(name: str, attempt: int = 0) -> frame_pb2.Frame:
    frame = frame_pb2.Frame(request_id=name, attempt=attempt, token_ids=[1])
    frame.final.end = frame_pb2.TASK_END_STOP
    return frame


def test_batches_are_counted_with_cause_and_waits(scene: Scene) -> None:
    scene.add("one")
    scene.add("two")
    scene.advance(now=2.0)
    assert scene.read(catalog.BATCHES) == {("echo", "slot_free", "all_waiting"): 1}
    assert scene.read(catalog.BATCH_ROWS) == {OF_CLASS: 2}
    assert scene.read(catalog.BATCH_TOKENS) == {("echo",): 8}
    assert scene.read(catalog.IN_FLIGHT) == {("echo",): 2}
    series = scene.read(catalog.QUEUE_WAIT)[OF_CLASS]
    assert isinstance(series, HistogramDataPoint)
    assert (series.count, series.sum) == (2, 4.0)


def test_what_waits_is_shown_with_its_age(scene: Scene) -> None:
    scene.add("waits")
    scene.advance(room=0)
    assert scene.read(catalog.QUEUED)[OF_CLASS] == 1
    ages = scene.read(catalog.OLDEST)
    assert ages["echo", "interactive"] == 0
    age = ages[OF_CLASS]
    assert isinstance(age, float)
    assert age > 0  # It waits since 0 of the monotonic clock.


def test_rows_that_end_or_are_returned_are_counted_once(scene: Scene) -> None:
    scene.add("lost")
    scene.advance()
    scene.table.on_lost("w", 0.0)
    scene.report("two")
    scene.add("lost", attempt=1)
    scene.advance()
    scene.report("two", end("lost", attempt=1))
    scene.add("gone")
    scene.table.cancel([frame_pb2.TaskRef(request_id="gone")], 0.0)
    scene.advance()
    scene.advance(now=10.0)
    ends = ("returned", "stop", "cancelled")
    assert scene.read(catalog.ROWS) == {(*OF_CLASS, end): 1 for end in ends}


def test_a_worker_is_shown_and_its_counts_begin_again_with_it(scene: Scene) -> None:
    scene.report("one", tokens=100)
    scene.advance()
    assert scene.read(catalog.WORKER_LIVE) == {OF_WORKER: 1, ("echo", "away"): 0}
    assert scene.read(catalog.WORKER_CACHE)[OF_WORKER] == 0.25
    assert scene.read(catalog.PREEMPTIONS)[OF_WORKER] == 1
    assert scene.read(catalog.WORKER_TOKENS)[*OF_WORKER, "output"] == 100
    scene.table.on_lost("w", 0.0)
    scene.advance(room=0)
    assert scene.read(catalog.WORKER_LIVE)[OF_WORKER] == 0
    scene.report("two", tokens=7)
    scene.advance()
    assert scene.read(catalog.WORKER_TOKENS)[*OF_WORKER, "output"] == 7
    series = scene.read(catalog.STEP_TIME)[OF_WORKER]
    assert isinstance(series, HistogramDataPoint)
    assert (series.count, series.sum, series.min, series.max) == (2 * BUCKETS, 3.0, 0.25, 0.5)
