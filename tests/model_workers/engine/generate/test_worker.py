"""A worker of `engine: generate`: what it grants, and what it does when `generate()` is stuck."""

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer

from model_workers.engine.generate.engine import GenerateEngine
from model_workers.engine.generate.model import GenerateModel
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import SequenceLimits
from model_workers.grants import Grants, class_capacities
from model_workers.worker import Worker
from sluice.internal.v1 import worker_pb2
from tests.support.generating_models import tiny
from tests.support.ports import FakePort
from tests.support.sequences import batch, open_channel, wire_row

SLOTS = 4
HELD_S = 30.0


class Held(GenerateModel):
    """Waits before each batch until it may go on."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.begun = Event()
        self.go_on = Event()

    def generate(self, sequences: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Any:
        self.begun.set()
        self.go_on.wait(HELD_S)
        return super().generate(sequences, *rest, **options)


@pytest.fixture
def model() -> Held:
    return Held(tiny("llama"))


@pytest.fixture
def worker(model: Held) -> Iterator[Worker]:
    engine = GenerateEngine(model, Sampler(), SequenceLimits(SLOTS, SLOTS, 256, 512))
    worker = Worker("m", engine, NoOpTracer(), on_fault=pytest.fail)
    worker.start()
    yield worker
    model.go_on.set()
    worker.stop()


def opened(worker: Worker) -> FakePort:
    port = FakePort()
    worker.handle(open_channel(), port)
    port.wait_ready()
    return port


def test_grants_are_none_while_a_batch_runs() -> None:
    grants = Grants()
    grants.open("b", 1, 1.0)
    load = worker_pb2.WorkerLoad(slots=4, running=1, batch_running=True)
    assert list(grants.give(load, 0.0)["b"].tasks) == [0, 0, 0]
    load.batch_running = False
    assert list(grants.give(load, 0.0)["b"].tasks) == [3, 3, 3]
    assert class_capacities(load)[0].tasks == 3


def test_worker_grants_the_next_batch_when_one_ends(worker: Worker, model: Held) -> None:
    channel = opened(worker)
    channel.wait_room(SLOTS, SLOTS, SLOTS)
    model.go_on.set()
    worker.handle(batch([wire_row("1", max_tokens=50), wire_row("2", max_tokens=3)]), FakePort())
    channel.wait_ends("1", "2")
    channel.wait_room(2 + SLOTS, 2 + SLOTS, 2 + SLOTS)
    running = [report for report in channel.reports if report.load.batch_running]
    assert {tuple(report.task_grants) for report in running} == {(2, 2, 2)}


def test_stuck_generate_ends_the_channel(worker: Worker, model: Held) -> None:
    channel = opened(worker)
    model.go_on.set()
    worker.handle(batch([wire_row("1", max_tokens=12)]), FakePort())
    channel.wait_ends("1")
    model.go_on.clear()
    model.begun.clear()
    worker.handle(batch([wire_row("2")], batch_id="stuck"), FakePort())
    assert model.begun.wait(HELD_S)
    channel.wait_ended()
    assert "2" not in channel.ends
