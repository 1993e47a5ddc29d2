import pytest

from batcher.core.channel import Channel, ChannelBroken
from sluice.internal.v1 import worker_pb2


def report(sequence: int, worker: str = "w", running: int = 0) -> worker_pb2.StepReport:
    load = worker_pb2.WorkerLoad(slots=8, running=running)
    return worker_pb2.StepReport(worker=worker, sequence=sequence, load=load)


def test_a_worker_that_has_not_spoken_has_no_room() -> None:
    channel = Channel()
    assert not channel.live
    assert channel.capacity(0, 0) == 0


def test_the_first_report_makes_it_live() -> None:
    channel = Channel()
    channel.step(report(0, running=3))
    assert channel.live
    assert (channel.worker, channel.slots, channel.running) == ("w", 8, 3)


@pytest.mark.parametrize("sequence", [0, 2, 7])
def test_a_jump_in_the_sequence_breaks_it(sequence: int) -> None:
    channel = Channel()
    channel.step(report(0))
    with pytest.raises(ChannelBroken, match=f"response {sequence} instead of 1"):
        channel.step(report(sequence))


def test_another_worker_breaks_it() -> None:
    channel = Channel()
    channel.step(report(0))
    with pytest.raises(ChannelBroken, match="worker other instead of w"):
        channel.step(report(1, worker="other"))


@pytest.mark.parametrize(
    ("running", "waiting", "in_flight", "unanswered", "room"),
    [
        (0, 0, 0, 0, 8),
        (5, 0, 2, 0, 3),  # three rows are another batcher's
        (0, 0, 6, 0, 2),  # its word is older than our rows
        (4, 0, 6, 2, 2),  # two more are on their way
        (8, 3, 2, 0, 0),  # it is over-full
    ],
)
def test_room_is_what_neither_its_count_nor_ours_uses(
    running: int, waiting: int, in_flight: int, unanswered: int, room: int
) -> None:
    channel = Channel()
    load = worker_pb2.WorkerLoad(slots=8, running=running, waiting=waiting)
    channel.step(worker_pb2.StepReport(worker="w", load=load))
    assert channel.capacity(in_flight, unanswered) == room


def test_after_a_refusal_nothing_is_sent_until_its_next_word() -> None:
    channel = Channel()
    channel.step(report(0))
    refusal = worker_pb2.Refusal(request_id="r", retryable=True)
    load = worker_pb2.WorkerLoad(slots=8)
    channel.admitted(worker_pb2.Admission(refused=[refusal], load=load))
    assert channel.capacity(0, 0) == 0
    channel.step(report(1))
    assert channel.capacity(0, 0) == 8


def test_a_refusal_for_good_says_nothing_about_room() -> None:
    channel = Channel()
    channel.step(report(0))
    channel.admitted(worker_pb2.Admission(refused=[worker_pb2.Refusal(request_id="r")]))
    assert channel.capacity(0, 0) == 8
