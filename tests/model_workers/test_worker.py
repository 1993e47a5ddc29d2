"""The worker with its threads, without Triton."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from threading import enumerate as threads
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer

from model_workers import worker as worker_module
from model_workers.engine.cacheless import EchoEngine
from model_workers.engine.protocol import SequenceStep
from model_workers.worker import InboxFull, Worker
from sluice.errors import BY_REASON
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.startup import ENGINE_NICE
from sluice.wire.codec import MalformedMessage
from tests.support.ports import FakePort
from tests.support.sequences import batch, cancel_tasks, open_channel, wire_row

FOREVER = 1_000_000


class Engine(EchoEngine):
    """An echo that can be told to break in its next ``faults`` steps, or to stay in one."""

    def __init__(self) -> None:
        super().__init__(slots=4, max_waiting=2, context_tokens=2 * FOREVER)
        self.faults = 0
        self.in_step = Event()
        self._go_on = Event()
        self._go_on.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Steps that begin meanwhile end afterwards."""
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()

    def step(self, now: float) -> list[SequenceStep]:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("out of memory")
        if not self._go_on.is_set():
            self.in_step.set()
            self._go_on.wait(30.0)
        return super().step(now)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def limits() -> dict[str, Any]:
    """Bounds of the worker that a test changes."""
    return {}


@pytest.fixture
def worker(engine: Engine, limits: dict[str, Any]) -> Iterator[Worker]:
    worker = Worker("small", engine, NoOpTracer(), on_fault=pytest.fail, **limits)
    worker.start()
    yield worker
    worker.stop()


def opened(worker: Worker, batcher: str = "batcher-1", epoch: int = 0) -> FakePort:
    port = FakePort()
    worker.handle(open_channel(batcher, epoch=epoch), port)
    port.wait_ready()
    return port


def queued(worker: Worker, request: worker_pb2.WorkerRequest) -> None:
    """Sends a request, and returns when the worker has queued it."""
    port = FakePort()
    worker.handle(request, port)
    port.wait_ended()
    assert not port.reports


def asked(
    worker: Worker, channel: FakePort, request: worker_pb2.WorkerRequest
) -> worker_pb2.Admission:
    """Sends a batch, and returns when the engine has taken it."""
    queued(worker, request)
    return channel.admission(request.batch.batch_id)


def indexes(frames: Sequence[frame_pb2.Frame]) -> list[int]:
    """The places in the answer of the tokens of frames, which may have several."""
    starts = ((frame.start_index, len(frame.token_ids)) for frame in frames)
    return [start + number for start, count in starts for number in range(count)]


def test_a_row_from_admission_to_its_final_frame(worker: Worker) -> None:
    channel = opened(worker)
    hello = channel.reports[0]
    assert (hello.worker, hello.sequence, hello.load.slots) == (worker.worker_id, 0, 4)
    admission = asked(worker, channel, batch([wire_row("r", [5, 6, 7], max_tokens=5, attempt=2)]))
    assert not admission.refused
    channel.wait_ends("r")
    assert channel.tokens("r") == [5, 6, 7, 5, 6]
    assert indexes(channel.frames) == list(range(5))
    assert {frame.attempt for frame in channel.frames} == {2}
    final = channel.frames[-1].final
    assert final.end == frame_pb2.TASK_END_LENGTH
    assert final.HasField("timings")
    assert not final.HasField("error")
    sequences = [report.sequence for report in channel.reports]
    assert sequences == list(range(len(sequences)))


def test_refusals_name_a_known_reason_and_whether_to_try_again(worker: Worker) -> None:
    channel = opened(worker)
    sequences = [wire_row(f"r{i}", max_tokens=FOREVER) for i in range(7)]
    bad = wire_row("bad")
    bad.task.sampling.max_tokens = 0
    admission = asked(worker, channel, batch([bad, wire_row("empty", []), *sequences]))
    refused = {refusal.request_id: refusal for refusal in admission.refused}
    assert {name: r.retryable for name, r in refused.items()} == {
        "bad": False,
        "empty": False,
        "r6": True,
    }
    assert all(refusal.error.reason in BY_REASON for refusal in refused.values())
    counting = next(report for report in channel.reports if report.admissions)
    assert (counting.load.running + counting.load.waiting, counting.load.slots) == (6, 4)


def test_room_is_granted_to_the_batcher_whose_rows_wait(worker: Worker) -> None:
    one, two = opened(worker, "one"), opened(worker, "two")
    for epoch, waiting in ((0, 9), (7, 0)):  # the second one is of another channel
        demand = worker_pb2.Demand(batcher="two", epoch=epoch, queued=(0, 0, waiting))
        queued(worker, worker_pb2.WorkerRequest(demand=demand))
    two.wait_room(2, 2, 4)
    one.wait_room(2, 2, 0)


def test_rows_that_end_or_are_refused_make_room(worker: Worker) -> None:
    channel = opened(worker)
    channel.wait_room(4, 4, 4)
    asked(worker, channel, batch([wire_row("r", max_tokens=FOREVER), wire_row("bad", [])]))
    channel.wait_room(5, 5, 5)
    queued(worker, cancel_tasks("r"))
    channel.wait_room(6, 6, 6)


def test_load_counts_running_batches_of_all_batchers(worker: Worker) -> None:
    one, two = opened(worker, "one"), opened(worker, "two")
    sequences = [wire_row("a", max_tokens=FOREVER), wire_row("b", max_tokens=FOREVER)]
    asked(worker, one, batch([*sequences, wire_row("bad", [])], "one", "one-1"))
    asked(worker, two, batch([wire_row("c", max_tokens=FOREVER)], "two", "two-1"))
    one.wait_batches(2)
    queued(worker, cancel_tasks("a", batcher="one"))
    two.wait_batches(2)
    queued(worker, cancel_tasks("b", batcher="one"))
    two.wait_batches(1)
    # A later attempt of a sequence that another batcher sends leaves its first batch.
    asked(worker, one, batch([wire_row("c", max_tokens=FOREVER, attempt=1)], "one", "one-2"))
    two.wait_batches(1)
    queued(worker, cancel_tasks("c", batcher="one", attempt=1))
    one.wait_batches(0)


def test_a_batcher_that_comes_back_keeps_its_new_channel(worker: Worker) -> None:
    first = opened(worker, epoch=1)
    first.cancelled = True
    second = opened(worker, epoch=2)
    second.wait_room(4, 4, 4)
    asked(worker, second, batch([wire_row("r", max_tokens=1)], epoch=2))
    second.wait_room(5, 5, 5)


def test_the_room_of_a_lost_batcher_is_the_others(worker: Worker) -> None:
    one, two = opened(worker, "one"), opened(worker, "two")
    one.wait_room(2, 2, 2)
    two.cancelled = True
    one.wait_room(4, 4, 4)


def test_a_batch_of_another_channel_is_not_taken(worker: Worker) -> None:
    queued(worker, batch([wire_row("nobody", max_tokens=FOREVER)], "nobody"))
    channel = opened(worker, epoch=2)
    queued(worker, batch([wire_row("late", max_tokens=FOREVER)], epoch=1, batch_id="late"))
    asked(worker, channel, batch([wire_row("r", max_tokens=1)], epoch=2))
    channel.wait_ends("r")
    assert "late" not in channel.admissions
    assert {frame.request_id for frame in channel.frames} == {"r"}


def test_a_batch_is_queued_while_a_step_takes_long(worker: Worker, engine: Engine) -> None:
    channel = opened(worker)
    asked(worker, channel, batch([wire_row("slow", max_tokens=1)], batch_id="slow"))
    channel.wait_ends("slow")
    with engine.held():
        queued(worker, batch([wire_row("r", max_tokens=1)], batch_id="step"))
        assert engine.in_step.wait(30.0)
        queued(worker, batch([wire_row("meanwhile", max_tokens=1)], batch_id="meanwhile"))
        queued(worker, cancel_tasks("r"))
        late = FakePort()
        worker.handle(open_channel("other"), late)
        late.wait_reports(3)
        assert not late.reports[-1].ready
        assert not channel.ended
    late.wait_ready()
    channel.wait_ends("r", "meanwhile")


def test_cancel_stops_the_callers_rows_only(worker: Worker) -> None:
    mine, other = opened(worker, "mine"), opened(worker, "other")
    asked(worker, mine, batch([wire_row("a", max_tokens=FOREVER)], "mine"))
    asked(worker, other, batch([wire_row("b", max_tokens=FOREVER)], "other"))
    queued(worker, cancel_tasks("a", "b", "unknown", batcher="mine"))
    mine.wait_ends("a")
    assert mine.ends == {"a": frame_pb2.TASK_END_CANCELLED}
    assert {frame.request_id for frame in mine.frames} == {"a"}
    queued(worker, cancel_tasks("b", batcher="other"))
    other.wait_ends("b")


def test_a_cancel_of_an_earlier_attempt_does_not_stop_a_row(worker: Worker) -> None:
    channel = opened(worker)
    asked(worker, channel, batch([wire_row("r", max_tokens=FOREVER, attempt=2)]))
    queued(worker, cancel_tasks("r", attempt=1))
    channel.wait_frames(len(channel.frames) + 10)
    assert not channel.ends
    queued(worker, cancel_tasks("r", attempt=2))
    channel.wait_ends("r")


def test_a_row_of_another_batcher_that_is_replaced_ends_there(worker: Worker) -> None:
    first, second = opened(worker, "batcher-1"), opened(worker, "batcher-2")
    asked(worker, first, batch([wire_row("r", max_tokens=FOREVER)]))
    first.wait_frames(2)
    sequence = wire_row("r", max_tokens=3, attempt=1)
    asked(worker, second, batch([sequence], "batcher-2"))
    second.wait_ends("r")
    first.wait_ends("r")

    end = first.frames[-1]
    assert (end.attempt, end.final.end) == (0, frame_pb2.TASK_END_CANCELLED)
    assert end.start_index + len(end.token_ids) == len(first.tokens("r"))
    assert second.tokens("r") == [5, 6, 7]


def test_a_channel_that_is_cancelled_ends_with_its_rows(worker: Worker, engine: Engine) -> None:
    channel = opened(worker)
    asked(worker, channel, batch([wire_row("r", max_tokens=FOREVER)]))
    channel.cancelled = True
    channel.wait_ended()
    again = opened(worker, epoch=1)
    admission = asked(worker, again, batch([wire_row("r", max_tokens=1, attempt=1)], epoch=1))
    assert not admission.refused
    again.wait_ends("r")


def test_a_second_channel_ends_the_rows_of_the_first(worker: Worker) -> None:
    """A suspended process comes back: by now its sequences are elsewhere, or come again with a higher attempt."""
    first = opened(worker)
    sequences = [wire_row(name, max_tokens=FOREVER) for name in ("elsewhere", "again")]
    asked(worker, first, batch(sequences))
    second = opened(worker, epoch=1)
    first.wait_ended()
    again = wire_row("again", max_tokens=9, attempt=1, produced=[5, 6])
    asked(worker, second, batch([again], batch_id="again", epoch=1))
    while "again" not in second.ends or second.ends["again"] != frame_pb2.TASK_END_LENGTH:
        second.wait_frames(len(second.frames) + 1)
    frames = [frame for frame in second.frames if frame.attempt == 1]
    assert indexes(frames) == list(range(2, 9))
    assert second.reports[-1].load.running == 0


def test_a_step_that_raises_returns_its_rows_and_nothing_else(
    worker: Worker, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    channel = opened(worker)
    engine.faults = 1
    asked(worker, channel, batch([wire_row("r", max_tokens=FOREVER)]))
    channel.wait_ends("r")
    final = channel.frames[-1].final
    assert (final.end, final.error.reason) == (frame_pb2.TASK_END_RETURNED, "ENGINE_FAILED")
    assert "RuntimeError" in final.error.message
    assert "out of memory" in caplog.text
    asked(worker, channel, batch([wire_row("next", max_tokens=2)], batch_id="next"))
    channel.wait_ends("next")


def last_try(name: str, *, max_tokens: int = 3) -> worker_pb2.BatchedTask:
    sequence = wire_row(name, max_tokens=max_tokens)
    sequence.task.last_try = True
    return sequence


def returns(channel: FakePort) -> dict[str, int]:
    """Sequences that were returned, and why."""
    finals = {frame.request_id: frame.final for frame in channel.frames if frame.HasField("final")}
    return {
        name: final.return_cause
        for name, final in finals.items()
        if final.end == frame_pb2.TASK_END_RETURNED
    }


@pytest.mark.parametrize("limits", [{"alone_s": 3600.0}])
def test_last_try_waits_alone_until_the_batcher_knows(worker: Worker) -> None:
    one, two = opened(worker, "one"), opened(worker, "two")
    asked(worker, one, batch([wire_row("there", max_tokens=FOREVER)], batcher="one"))
    sequences = [wire_row("before"), last_try("suspect"), wire_row("beside"), last_try("other")]
    admission = asked(worker, two, batch(sequences, batcher="two", batch_id="b2"))
    assert [(one.request_id, one.retryable) for one in admission.refused] == [
        ("beside", True),
        ("other", True),
    ]
    one.wait_ends("there")
    assert returns(one) == {"there": frame_pb2.RETURN_CAUSE_NOT_ACCEPTED}
    assert returns(two) == {"before": frame_pb2.RETURN_CAUSE_NOT_ACCEPTED}
    one.wait_room(1, 1, 1)
    two.wait_room(4, 4, 4)
    late = asked(worker, one, batch([wire_row("late")], batcher="one", batch_id="b3"))
    again = asked(worker, two, batch([last_try("suspect")], batcher="two", batch_id="b4"))
    assert late.refused[0].retryable
    assert again.refused[0].retryable
    one.wait_room(2, 2, 2)
    two.wait_room(5, 5, 5)
    assert two.tokens("suspect") == []


def test_after_its_first_token_others_come_beside_a_last_try(worker: Worker) -> None:
    channel = opened(worker)
    asked(worker, channel, batch([last_try("suspect", max_tokens=FOREVER)]))
    channel.wait_room(4, 4, 4)
    admission = asked(worker, channel, batch([wire_row("other", max_tokens=2)], batch_id="other"))
    assert not admission.refused
    channel.wait_ends("other")
    assert channel.tokens("suspect")


def test_refused_or_cancelled_last_try_releases_the_worker(
    worker: Worker,
) -> None:
    channel = opened(worker)
    long = last_try("long")
    long.task.prompt_token_ids.extend(range(2 * FOREVER))
    assert asked(worker, channel, batch([long])).refused
    channel.wait_room(5, 5, 5)
    asked(worker, channel, batch([last_try("gone", max_tokens=FOREVER)], batch_id="gone"))
    queued(worker, cancel_tasks("gone"))
    channel.wait_ends("gone")
    channel.wait_room(6, 6, 6)


def test_last_try_is_not_isolated_on_a_remote_engine(engine: Engine) -> None:
    worker = Worker("small", engine, NoOpTracer(), on_fault=pytest.fail, isolates=False)
    worker.start()
    channel = opened(worker)
    sequences = [wire_row("there", max_tokens=FOREVER), last_try("suspect")]
    assert not asked(worker, channel, batch(sequences)).refused
    channel.wait_ends("suspect")
    assert channel.ends == {"suspect": frame_pb2.TASK_END_LENGTH}
    worker.stop()


@pytest.mark.parametrize("more", [0, 3])
def test_only_the_thread_that_computes_gives_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setenv(ENGINE_NICE, str(mine + more))
    worker = Worker("small", engine, NoOpTracer(), on_fault=pytest.fail)
    worker.start()
    opened(worker)
    found = {one.name: os.getpriority(os.PRIO_PROCESS, one.native_id or 0) for one in threads()}
    assert (found["engine"], found["sender"]) == (mine + more, mine)
    worker.stop()


def test_an_engine_whose_steps_always_raise_is_given_up(engine: Engine) -> None:
    fault = Event()
    worker = Worker("small", engine, NoOpTracer(), on_fault=fault.set)
    worker.start()
    channel = opened(worker)
    engine.faults = worker_module.FAULTS_MAX
    for number in range(worker_module.FAULTS_MAX):
        queued(worker, batch([wire_row(f"r{number}")]))
        if number + 1 < worker_module.FAULTS_MAX:
            channel.wait_ends(f"r{number}")
    assert fault.wait(30.0)
    worker.stop()


def test_a_fault_of_ours_is_not_silent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Event()
    worker = Worker("small", engine, NoOpTracer(), on_fault=fault.set)
    monkeypatch.setattr(worker_module.Worker, "_report", lambda *_: 1 / 0)
    worker.start()
    opened(worker)
    queued(worker, batch([wire_row("r")]))
    assert fault.wait(30.0)
    assert "engine thread ended by a fault" in caplog.text
    worker.stop()


def test_a_port_that_breaks_does_not_end_the_sender(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    broken = FakePort()
    broken.broken = True
    worker.handle(open_channel("broken"), broken)
    channel = opened(worker)
    asked(worker, channel, batch([wire_row("r")]))
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
    assert not port.reports


def test_stop_ends_all_requests() -> None:
    worker = Worker("small", EchoEngine(2, 0, 64), NoOpTracer(), on_fault=pytest.fail)
    worker.start()
    channel = opened(worker)
    worker.stop()
    assert channel.ended


@pytest.mark.parametrize("limits", [{"inbox_max": 0}])
def test_a_full_inbox_refuses_at_once(worker: Worker) -> None:
    for request in (batch([wire_row("r")]), cancel_tasks("r")):
        port = FakePort()
        with pytest.raises(InboxFull):
            worker.handle(request, port)
        assert not port.ended
