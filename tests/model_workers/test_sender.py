"""The sending thread: bounds and order. The channels themselves are tested in test_channels.py."""

from collections.abc import Iterator
from threading import Event, Thread

import pytest

from model_workers.channels import Channels, Posted
from model_workers.engine.protocol import SequenceStep
from model_workers.grants import Grant
from model_workers.sender import BACKLOG_FRAMES_MAX, Sender
from model_workers.watchdog import FIRST_LIMIT_S, Watchdog
from sluice.internal.v1 import frame_pb2, worker_pb2
from tests.support.ports import FakePort


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowPort(FakePort):
    """A port whose `send` blocks until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = Event()

    def send(self, report: worker_pb2.StepReport) -> None:
        """Blocks, then keeps the report."""
        assert self.go_on.wait(30.0)
        super().send(report)


@pytest.fixture
def lost() -> list[tuple[str, float]]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog()


@pytest.fixture
def hung() -> Event:
    return Event()


@pytest.fixture
def sender(
    lost: list[tuple[str, float]], clock: Clock, watchdog: Watchdog, hung: Event
) -> Iterator[Sender]:
    sender = Sender(
        Channels("worker-1"),
        watchdog,
        clock,
        lambda *gone: lost.append(gone),
        hung.set,
        backlog_wait_s=0.2,
    )
    thread = Thread(target=sender.run)
    thread.start()
    yield sender
    sender.stop()
    thread.join(30.0)
    assert not thread.is_alive()


def opened(sender: Sender, port: FakePort, heartbeat_s: float) -> None:
    """Opens the channel of batcher "b", served by the engine."""
    sender.open(worker_pb2.OpenChannel(batcher="b", heartbeat_ms=int(heartbeat_s * 1000)), port)
    sender.make_ready("b", 0)


def frames(count: int) -> list[Posted]:
    """Of as many rows, which have ended."""
    return [(SequenceStep(f"r{i}", "b", 0, i), frame_pb2.Final()) for i in range(count)]


def test_a_channel_starts_without_the_grant_of_the_one_before(sender: Sender) -> None:
    opened(sender, FakePort(), 60.0)
    later = FakePort()
    sender.open(worker_pb2.OpenChannel(batcher="b", epoch=1, heartbeat_ms=60_000), later)
    # The engine was in a step: its report has totals of the channel before.
    sender.post({}, worker_pb2.WorkerLoad(), grants={"b": Grant([58, 58, 58])})
    sender.make_ready("b", 1)
    later.wait_ready()
    assert [list(report.task_grants) for report in later.reports if report.ready] == [[]]


def test_steps_share_a_report_when_sending_is_slow(sender: Sender) -> None:
    port = SlowPort()
    opened(sender, port, 60.0)
    for frame in frames(5):
        sender.post({"b": [frame]}, worker_pb2.WorkerLoad())
    port.go_on.set()
    port.wait_frames(5)
    assert len(port.reports) <= 2
    assert [frame.start_index for frame in port.frames] == list(range(5))


def test_a_full_backlog_holds_the_engine_up_until_it_has_gone(sender: Sender) -> None:
    port = SlowPort()
    opened(sender, port, 60.0)
    assert sender.has_capacity()
    sender.post({"b": frames(2 * BACKLOG_FRAMES_MAX)}, worker_pb2.WorkerLoad())
    assert not sender.has_capacity()
    port.go_on.set()
    port.wait_frames(2 * BACKLOG_FRAMES_MAX)
    assert sender.has_capacity()


def test_who_has_gone_is_noticed_with_a_heartbeat(
    sender: Sender, clock: Clock, lost: list[tuple[str, float]]
) -> None:
    port = FakePort()
    opened(sender, port, 5.0)
    port.wait_reports(1)
    port.cancelled = True
    clock.now = 5.0
    sender.post({}, worker_pb2.WorkerLoad())
    port.wait_ended()
    assert not sender.has_channel("b", 0)
    assert lost == [("b", 5.0)]


def test_hanging_engine_ends_its_channels_then_the_process(
    sender: Sender, clock: Clock, watchdog: Watchdog, lost: list[tuple[str, float]], hung: Event
) -> None:
    served, opening = FakePort(), FakePort()
    opened(sender, served, 5.0)
    sender.open(worker_pb2.OpenChannel(batcher="other", heartbeat_ms=5000), opening)
    opening.wait_reports(1)
    watchdog.begin(1, clock.now)
    while not hung.is_set():
        clock.now += 0.2
        sender.end(FakePort())  # wakes the thread
        hung.wait(0.001)
    assert served.ended
    assert not opening.ended
    assert lost[0][0] == "b"
    assert FIRST_LIMIT_S < lost[0][1] < clock.now
    watchdog.end(clock.now, is_step=True)
