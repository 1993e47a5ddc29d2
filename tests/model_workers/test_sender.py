"""The sending thread: bounds and order. The channels themselves are tested in test_channels.py."""

from collections.abc import Iterator
from threading import Event, Thread

import pytest

from model_workers import sender as sender_module
from model_workers.sender import BACKLOG_FRAMES_MAX, Channels, Sender
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

    def send(self, response: worker_pb2.WorkerResponse, *, last: bool = False) -> None:
        """Blocks, then keeps the response."""
        assert self.go_on.wait(10.0)
        super().send(response, last=last)


@pytest.fixture
def lost() -> list[tuple[str, float]]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sender(lost: list[tuple[str, float]], clock: Clock) -> Iterator[Sender]:
    sender = Sender(Channels("worker-1"), clock, lambda *gone: lost.append(gone))
    thread = Thread(target=sender.run)
    thread.start()
    yield sender
    sender.stop()
    thread.join(10.0)
    assert not thread.is_alive()


def frames(count: int) -> list[frame_pb2.Frame]:
    return [frame_pb2.Frame(request_id="r", start_index=i) for i in range(count)]


def test_steps_share_a_report_when_sending_is_slow(sender: Sender) -> None:
    port = SlowPort()
    sender.open("b", port, 60.0)
    for frame in frames(5):
        sender.post({"b": [frame]}, worker_pb2.WorkerLoad())
    port.go_on.set()
    port.wait_frames(5)
    assert len(port.responses) <= 2
    assert [frame.start_index for frame in port.frames] == list(range(5))


def test_a_full_backlog_holds_the_engine_up_until_it_has_gone(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = SlowPort()
    sender.open("b", port, 60.0)
    assert sender.has_room()
    sender.post({"b": frames(2 * BACKLOG_FRAMES_MAX)}, worker_pb2.WorkerLoad())
    with monkeypatch.context() as patch:
        patch.setattr(sender_module, "BACKLOG_WAIT_S", 0.01)
        assert not sender.has_room()
    port.go_on.set()
    port.wait_frames(2 * BACKLOG_FRAMES_MAX)
    assert sender.has_room()


def test_heartbeats_come_by_the_clock_and_carry_the_load(sender: Sender, clock: Clock) -> None:
    port = FakePort()
    sender.open("b", port, 5.0)
    port.wait_responses(1)
    clock.now = 5.0
    sender.post({}, worker_pb2.WorkerLoad(steps=7))
    port.wait_responses(2)
    assert port.responses[1].step.load.steps == 7
    assert not port.responses[1].step.frames


def test_who_has_gone_is_noticed_with_a_heartbeat(
    sender: Sender, clock: Clock, lost: list[tuple[str, float]]
) -> None:
    port = FakePort()
    sender.open("b", port, 5.0)
    port.wait_responses(1)
    port.cancelled = True
    clock.now = 5.0
    sender.post({}, worker_pb2.WorkerLoad())
    port.wait_ended()
    assert not sender.has_channel("b")
    assert lost == [("b", 5.0)]


def test_an_answer_ends_its_request(sender: Sender) -> None:
    port = FakePort()
    sender.answer(port, worker_pb2.WorkerResponse(admission=worker_pb2.Admission(accepted=["r"])))
    assert list(port.admission().accepted) == ["r"]
