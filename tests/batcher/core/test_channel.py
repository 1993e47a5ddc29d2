import math

import pytest

from batcher.core.channel import Channel, ChannelBroken
from batcher.core.peers import Share
from batcher.core.transit import Flight, Sent
from sluice.internal.v1 import worker_pb2


def report(sequence: int, worker: str = "w", running: int = 0) -> worker_pb2.StepReport:
    load = worker_pb2.WorkerLoad(slots=8, running=running)
    return worker_pb2.StepReport(worker=worker, sequence=sequence, load=load)


def free_rows(channel: Channel, sent: Sent | None = None) -> int:
    return channel.capacity("name", sent or Sent(), Share()).free_rows


def test_a_worker_that_has_not_spoken_has_no_room() -> None:
    channel = Channel()
    assert not channel.live
    assert free_rows(channel) == 0


def test_the_first_report_makes_it_live() -> None:
    channel = Channel()
    channel.step(report(0, running=3), 0.0)
    assert channel.live
    assert (channel.worker, channel.slots, channel.running) == ("w", 8, 3)


@pytest.mark.parametrize("sequence", [0, 2, 7])
def test_a_jump_in_the_sequence_breaks_it(sequence: int) -> None:
    channel = Channel()
    channel.step(report(0), 0.0)
    with pytest.raises(ChannelBroken, match=f"response {sequence} instead of 1"):
        channel.step(report(sequence), 0.0)


def test_another_worker_breaks_it() -> None:
    channel = Channel()
    channel.step(report(0), 0.0)
    with pytest.raises(ChannelBroken, match="worker other instead of w"):
        channel.step(report(1, worker="other"), 0.0)


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
    channel.step(worker_pb2.StepReport(worker="w", load=load), 0.0)
    assert free_rows(channel, Sent((Flight(in_flight, unanswered),))) == room


def test_after_a_refusal_nothing_is_sent_until_its_next_word() -> None:
    channel = Channel()
    channel.step(report(0), 0.0)
    refusal = worker_pb2.Refusal(request_id="r", retryable=True)
    load = worker_pb2.WorkerLoad(slots=8)
    channel.admitted(worker_pb2.Admission(refused=[refusal], load=load))
    assert free_rows(channel) == 0
    channel.step(report(1), 0.0)
    assert free_rows(channel) == 8


def test_a_refusal_for_good_says_nothing_about_room() -> None:
    channel = Channel()
    channel.step(report(0), 0.0)
    channel.admitted(worker_pb2.Admission(refused=[worker_pb2.Refusal(request_id="r")]))
    assert free_rows(channel) == 8


def test_room_in_the_cache_is_what_no_row_has_or_will_take() -> None:
    channel = Channel()
    load = worker_pb2.WorkerLoad(
        slots=8, block_tokens=16, cache_blocks=100, free_blocks=50, waiting_tokens=100
    )
    channel.step(worker_pb2.StepReport(worker="w", load=load), 0.0)
    sent = Sent((Flight(2, 2, 30, 200),), batches_unanswered=1)
    capacity = channel.capacity("name", sent, Share(batchers=2))
    assert capacity.free_tokens == (800 - 100 - 200) / 2
    assert capacity.waiting_tokens == 130
    assert capacity.batches_in_flight == 1


def test_without_a_paged_cache_only_rows_limit_it() -> None:
    channel = Channel()
    channel.step(report(0), 0.0)
    assert channel.capacity("name", Sent(), Share()).free_tokens == math.inf


def ranks(*rows: tuple[int, int]) -> list[worker_pb2.RankLoad]:
    """Rows that run and wait, of each class; each has ten tokens, and waiting ones compute them all."""
    return [
        worker_pb2.RankLoad(
            running=running,
            waiting=waiting,
            running_tokens=10 * running,
            waiting_tokens=10 * waiting,
        )
        for running, waiting in rows
    ]


def test_urgent_classes_find_the_slots_of_less_urgent_ones() -> None:
    channel = Channel()
    load = worker_pb2.WorkerLoad(
        slots=8,
        places=12,
        running=8,
        waiting=1,
        waiting_tokens=10,
        block_tokens=10,
        cache_blocks=20,
        free_blocks=6,
        ranks=ranks((1, 0), (2, 0), (5, 1)),
    )
    channel.step(worker_pb2.StepReport(worker="w", load=load), 0.0)
    # One interactive row more is on its way; all bulk rows are of another batcher.
    sent = Sent((Flight(2, 1, 5, 20), Flight(2), Flight()), batches_unanswered=1)
    capacity = channel.capacity("name", sent, Share())
    assert (capacity.free_rows, capacity.free_tokens, capacity.waiting_tokens) == (0, 30, 15)
    # Ten rows are here or on their way, so two places are left.
    found = [(c.free_rows, c.free_tokens, c.waiting_tokens) for c in capacity.preemptible]
    assert found == [(2, 60 + 20 - 20 + 50, 5), (2, 30 + 60, 5)]
    assert not channel.capacity("n", sent, Share(1, 3)).preemptible[1].free_rows
    unable = worker_pb2.WorkerLoad(slots=8, running=8)
    channel.admitted(worker_pb2.Admission(load=unable))
    assert channel.capacity("name", sent, Share()).preemptible == ()
