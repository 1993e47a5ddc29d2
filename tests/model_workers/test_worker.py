"""The worker with its threads, without Triton."""

import math
from collections.abc import Iterator
from threading import Event

import pytest
from opentelemetry.trace import NoOpTracer

from model_workers import worker as worker_module
from model_workers.engine.cacheless import EchoEngine
from model_workers.engine.protocol import RowStep
from model_workers.worker import Worker
from sluice.errors import BY_REASON
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.wire.codec import MalformedMessage
from tests.support.ports import FakePort
from tests.support.rows import batch, cancel_rows, open_channel, wire_row

FOREVER = 1_000_000


class Engine(EchoEngine):
    """An echo that can be told to break in its next step."""

    def __init__(self) -> None:
        super().__init__(slots=4, max_waiting=2, context_tokens=2 * FOREVER)
        self.broken = False

    def step(self, now: float) -> list[RowStep]:
        if self.broken:
            self.broken = False
            raise RuntimeError("out of memory")
        return super().step(now)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def worker(engine: Engine) -> Iterator[Worker]:
    worker = Worker("small", engine, NoOpTracer(), on_fault=pytest.fail)
    worker.start()
    yield worker
    worker.stop()


def opened(worker: Worker, batcher: str = "batcher-1") -> FakePort:
    port = FakePort()
    worker.handle(open_channel(batcher), port)
    port.wait_responses()
    return port


def asked(worker: Worker, request: worker_pb2.WorkerRequest) -> worker_pb2.Admission:
    port = FakePort()
    worker.handle(request, port)
    return port.admission()


def test_a_row_from_admission_to_its_final_frame(worker: Worker) -> None:
    channel = opened(worker)
    hello = channel.responses[0].step
    assert (hello.worker, hello.sequence, hello.load.slots) == (worker.worker_id, 0, 4)
    admission = asked(worker, batch([wire_row("r", [5, 6, 7], max_tokens=5, attempt=2)]))
    assert (list(admission.accepted), len(admission.refused)) == (["r"], 0)
    channel.wait_ends("r")
    assert channel.tokens("r") == [5, 6, 7, 5, 6]
    assert [frame.start_index for frame in channel.frames] == list(range(5))
    assert {frame.attempt for frame in channel.frames} == {2}
    final = channel.frames[-1].final
    assert final.end == frame_pb2.ROW_END_LENGTH
    assert final.HasField("timings")
    assert not final.HasField("error")
    sequences = [response.step.sequence for response in channel.responses]
    assert sequences == list(range(len(sequences)))


def test_refusals_name_a_known_reason_and_whether_to_try_again(worker: Worker) -> None:
    opened(worker)
    rows = [wire_row(f"r{i}", max_tokens=FOREVER) for i in range(7)]
    bad = wire_row("bad")
    bad.task.sampling.max_tokens = 0
    admission = asked(worker, batch([bad, wire_row("empty", []), *rows]))
    assert list(admission.accepted) == [f"r{i}" for i in range(6)]
    refused = {refusal.request_id: refusal for refusal in admission.refused}
    assert {name: r.retryable for name, r in refused.items()} == {
        "bad": False,
        "empty": False,
        "r6": True,
    }
    assert all(refusal.error.reason in BY_REASON for refusal in refused.values())
    assert (admission.load.running + admission.load.waiting, admission.load.slots) == (6, 4)


def test_rows_of_a_batcher_without_a_channel_are_refused(worker: Worker) -> None:
    admission = asked(worker, batch([wire_row("r")]))
    assert admission.refused[0].error.reason == "MODEL_UNAVAILABLE"
    assert admission.refused[0].retryable


def test_cancel_stops_the_callers_rows_only(worker: Worker) -> None:
    mine, other = opened(worker, "mine"), opened(worker, "other")
    asked(worker, batch([wire_row("a", max_tokens=FOREVER)], "mine"))
    asked(worker, batch([wire_row("b", max_tokens=FOREVER)], "other"))
    admission = asked(worker, cancel_rows("a", "b", "unknown", batcher="mine"))
    assert not admission.accepted
    mine.wait_ends("a")
    assert mine.ends == {"a": frame_pb2.ROW_END_CANCELLED}
    assert {frame.request_id for frame in mine.frames} == {"a"}
    asked(worker, cancel_rows("b", batcher="other"))
    other.wait_ends("b")


def test_the_deadline_counts_from_the_arrival(worker: Worker) -> None:
    channel = opened(worker)
    asked(worker, batch([wire_row("r", max_tokens=FOREVER, timeout_ms=20)]))
    channel.wait_ends("r")
    assert channel.ends == {"r": frame_pb2.ROW_END_DEADLINE}


def test_a_channel_that_is_cancelled_ends_with_its_rows(worker: Worker, engine: Engine) -> None:
    channel = opened(worker)
    asked(worker, batch([wire_row("r", max_tokens=FOREVER)]))
    channel.cancelled = True
    channel.wait_ended()
    again = opened(worker)
    again.wait_responses(2)
    assert asked(worker, batch([wire_row("r", max_tokens=1)])).accepted == ["r"]
    again.wait_ends("r")


def test_a_lost_channel_takes_only_rows_along_that_came_before(worker: Worker) -> None:
    """The batcher may be back with a new channel and new rows before the loss of the old one is dealt with."""
    channel = opened(worker)
    asked(worker, batch([wire_row("r", max_tokens=FOREVER)]))
    worker._loop.submit(worker_module.AbandonCommand("batcher-1", at=0.0))
    asked(worker, cancel_rows())
    channel.wait_frames(len(channel.frames) + 10)
    assert not channel.ends
    worker._loop.submit(worker_module.AbandonCommand("batcher-1", at=math.inf))
    channel.wait_ends("r")


def test_a_second_channel_takes_over_and_rows_go_on(worker: Worker) -> None:
    first = opened(worker)
    asked(worker, batch([wire_row("r", max_tokens=FOREVER)]))
    second = opened(worker)
    first.wait_ended()
    asked(worker, cancel_rows("r"))
    second.wait_ends("r")


def test_a_step_that_raises_fails_its_rows_and_nothing_else(
    worker: Worker, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    channel = opened(worker)
    engine.broken = True
    asked(worker, batch([wire_row("r", max_tokens=FOREVER)]))
    channel.wait_ends("r")
    final = channel.frames[-1].final
    assert (final.end, final.error.reason) == (frame_pb2.ROW_END_FAILED, "ENGINE_FAILED")
    assert "RuntimeError" in final.error.message
    assert "out of memory" in caplog.text
    asked(worker, batch([wire_row("next", max_tokens=2)]))
    channel.wait_ends("next")


def test_a_fault_of_ours_is_not_silent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Event()
    worker = Worker("small", engine, NoOpTracer(), on_fault=fault.set)
    monkeypatch.setattr(worker_module.EngineLoop, "_report", lambda *_: 1 / 0)
    worker.start()
    opened(worker)
    asked(worker, batch([wire_row("r")]))
    assert fault.wait(10.0)
    assert "engine thread ended by a fault" in caplog.text
    worker.stop()


def test_a_port_that_breaks_does_not_end_the_sender(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    broken = FakePort()
    broken.broken = True
    worker.handle(open_channel("broken"), broken)
    channel = opened(worker)
    asked(worker, batch([wire_row("r")]))
    channel.wait_ends("r")
    assert "could not be sent" in caplog.text


@pytest.mark.parametrize(
    "request_",
    [
        worker_pb2.WorkerRequest(),
        open_channel(""),
        open_channel(heartbeat_ms=0),
        batch([]),
        batch([wire_row("r")], batcher=""),
    ],
)
def test_requests_without_sense_are_malformed(
    worker: Worker, request_: worker_pb2.WorkerRequest
) -> None:
    port = FakePort()
    with pytest.raises(MalformedMessage):
        worker.handle(request_, port)
    assert not port.responses


def test_stop_ends_all_requests() -> None:
    worker = Worker("small", EchoEngine(2, 0, 64), NoOpTracer(), on_fault=pytest.fail)
    worker.start()
    channel = opened(worker)
    worker.stop()
    assert channel.ended


def test_a_full_inbox_refuses_at_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(worker)
    monkeypatch.setattr(worker_module, "INBOX_MAX", 0)
    admission = asked(worker, batch([wire_row("r")]))
    assert admission.refused[0].error.reason == "MODEL_UNAVAILABLE"
    assert admission.refused[0].retryable
    assert asked(worker, cancel_rows("r")) == worker_pb2.Admission()
