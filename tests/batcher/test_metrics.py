"""What a batcher counts, and what it shows of its workers."""

import pytest
from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.trace import INVALID_SPAN_CONTEXT
from typing_extensions import override

from batcher.core.requests import Actions
from batcher.metrics import BatcherMetrics
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.instruments import Instruments, Labels
from tests.batcher.core.desk import WORKER, Desk

OF_CLASS = "echo", "standard"
OF_WORKER = "echo", WORKER
BUCKETS = len(METRICS["sluice.worker.step.duration"].bounds) + 1
LOAD = worker_pb2.WorkerLoad(slots=4, running=1, cache_blocks=8, free_blocks=6, preemptions=1)


def counts(tokens: int) -> worker_pb2.WorkerCounts:
    return worker_pb2.WorkerCounts(
        step_buckets=[2] * BUCKETS,
        step_s=3.0,
        step_tasks=5,
        tokens=tokens,
        shortest_step_s=0.25,
        longest_step_s=0.5,
    )


class Scene(Desk):
    """A request table whose actions are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.instruments = Instruments()
        self.metrics = BatcherMetrics(self.instruments)
        self.metrics.on_model("echo", [WORKER, "away"], self.table)
        self.report(load=LOAD)

    @override
    def decide(self) -> Actions:
        actions = super().decide()
        for request in actions.ended:
            self.metrics.on_ended(request)
        for batch in actions.batches:
            self.metrics.on_batch(batch, lambda _: INVALID_SPAN_CONTEXT)
        capacities = self.table.workers.capacities(self.table.workers.active(), self.now)
        classes = self.table.queue.waits.class_reports(self.now, capacities)
        self.metrics.on_report(control_pb2.ModelReport(model="echo", classes=classes))
        return actions

    def read(self, name: str) -> dict[Labels, float | HistogramDataPoint]:
        return {
            labels: value
            for found, points in self.instruments.collect()
            if found.name == name
            for labels, value in points
        }


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_batches_are_counted_with_cause_and_waits(scene: Scene) -> None:
    scene.add("one")
    scene.add("two")
    scene.advance(room=8, after_s=0.5)
    assert scene.read("sluice.batches") == {("echo", "slot_free", "all_waiting"): 1}
    assert scene.read("sluice.batch.rows") == {OF_CLASS: 2}
    assert scene.read("sluice.batch.tokens") == {("echo",): 6}
    assert scene.read("sluice.rows.in_flight") == {("echo",): 2}
    series = scene.read("sluice.queue.wait")[OF_CLASS]
    assert isinstance(series, HistogramDataPoint)
    assert (series.count, series.sum) == (2, 1.0)


def test_what_waits_is_shown_with_its_age(scene: Scene) -> None:
    scene.now = 0.0  # of the monotonic clock
    scene.add("waits")
    scene.advance()
    assert scene.read("sluice.queue.tasks")[OF_CLASS] == 1
    ages = scene.read("sluice.queue.oldest_age")
    age = ages[OF_CLASS]
    assert isinstance(age, float)
    assert (ages["echo", "interactive"], age > 0) == (0, True)


def test_rows_that_end_or_are_returned_are_counted_once(scene: Scene) -> None:
    scene.run("lost")
    scene.table.on_lost(WORKER, scene.now)
    scene.report(worker=WORKER)
    scene.add("lost", attempt=1)
    scene.admit(scene.send())
    scene.step("lost", attempt=1, end=frame_pb2.TASK_END_STOP)
    scene.add("gone")
    scene.cancel("gone")
    scene.advance()
    scene.advance(after_s=10.0)
    ends = ("returned", "stop", "cancelled")
    assert scene.read("sluice.rows") == {(*OF_CLASS, end): 1 for end in ends}


def test_a_worker_is_shown_and_its_counts_begin_again_with_it(scene: Scene) -> None:
    scene.report(load=LOAD, counts=counts(100))
    assert scene.read("sluice.worker.live") == {OF_WORKER: 1, ("echo", "away"): 0}
    assert scene.read("sluice.worker.kv_cache.usage")[OF_WORKER] == 0.25
    assert scene.read("sluice.worker.preemptions")[OF_WORKER] == 1
    assert scene.read("sluice.worker.tokens")[*OF_WORKER, "output"] == 100
    scene.table.on_lost(WORKER, scene.now)
    scene.advance()
    assert scene.read("sluice.worker.live")[OF_WORKER] == 0
    scene.report(load=LOAD, counts=counts(7))
    assert scene.read("sluice.worker.tokens")[*OF_WORKER, "output"] == 7
    series = scene.read("sluice.worker.step.duration")[OF_WORKER]
    assert isinstance(series, HistogramDataPoint)
    assert (series.count, series.sum, series.min, series.max) == (2 * BUCKETS, 3.0, 0.25, 0.5)
