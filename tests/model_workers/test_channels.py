import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.sender import (
    LOAD_UPDATE_S,
    REPORT_FRAMES_MAX,
    Channels,
    DueReport,
    ResponseSender,
)
from sluice.internal.v1 import frame_pb2, worker_pb2
from tests.support.ports import FakePort


def frames(count: int, first: int = 0) -> list[frame_pb2.Frame]:
    return [frame_pb2.Frame(request_id="r", start_index=first + i) for i in range(count)]


def open_one(
    opened: Channels, batcher: str = "b", opening: int = 0, *, now: float = 0.0, ready: bool = True
) -> ResponseSender | None:
    """Opens a channel with a heartbeat a second; returns the sender of the older one."""
    message = worker_pb2.OpenChannel(batcher=batcher, heartbeat_ms=1000, opening=opening)
    older = opened.open(message, FakePort(), now)
    channel = opened.get(batcher, opening)
    if channel is not None:
        channel.ready = ready
    return older


def channels() -> Channels:
    opened = Channels("worker-1")
    open_one(opened)
    return opened


def reports(due: list[DueReport]) -> list[worker_pb2.StepReport]:
    return [entry.report for entry in due]


def test_a_new_channel_says_hello() -> None:
    opened = channels()
    opened.set_load(worker_pb2.WorkerLoad(slots=3), 0.0)
    (report,) = reports(opened.due(0.0))
    assert (report.worker, report.sequence, report.load.slots) == ("worker-1", 0, 3)
    assert not report.frames
    assert opened.due(0.9) == []


def test_heartbeats_go_out_with_and_without_frames() -> None:
    opened = channels()
    opened.due(0.0)
    opened.post("b", frames(1))
    (report,) = opened.due(0.5)
    assert not report.is_heartbeat
    assert opened.next_due() == 1.0
    (report,) = opened.due(1.0)
    assert report.is_heartbeat
    assert opened.next_due() == 2.0


def test_all_batchers_hear_of_another_load_soon_but_not_at_every_change() -> None:
    opened = channels()
    open_one(opened, "other")
    opened.due(0.0)
    opened.set_load(worker_pb2.WorkerLoad(slots=3, running=1), 0.1)
    opened.post("b", frames(1))
    (report,) = opened.due(0.1)
    assert report.channel.batcher == "b"
    opened.set_load(worker_pb2.WorkerLoad(slots=3, running=2), 0.12)
    assert opened.next_due() == pytest.approx(0.1 + LOAD_UPDATE_S)
    assert opened.due(0.14) == []
    (update,) = opened.due(0.16)
    assert (update.channel.batcher, update.is_heartbeat) == ("other", False)
    assert update.report.load.running == 2
    (update,) = opened.due(0.18)
    assert update.channel.batcher == "b"
    # What does not change is no update, and steps alone change nothing.
    opened.set_load(worker_pb2.WorkerLoad(slots=3, running=2, steps=9), 0.2)
    assert opened.next_due() == 1.0


@given(st.lists(st.integers(0, 3 * REPORT_FRAMES_MAX), max_size=5))
def test_all_frames_leave_in_order_and_reports_are_numbered(steps: list[int]) -> None:
    opened = channels()
    sent: list[worker_pb2.StepReport] = reports(opened.due(0.0))
    posted = 0
    for count in steps:
        opened.post("b", frames(count, posted))
        posted += count
        assert opened.backlog > 0 or count == 0
        sent += reports(opened.due(0.0))
    while opened.backlog:
        sent += reports(opened.due(0.0))
    assert [report.sequence for report in sent] == list(range(len(sent)))
    assert [f.start_index for report in sent for f in report.frames] == list(range(posted))
    assert max(len(report.frames) for report in sent) <= REPORT_FRAMES_MAX


def test_each_batcher_gets_its_own_frames() -> None:
    opened = channels()
    open_one(opened, "other")
    opened.due(0.0)
    opened.post("other", frames(1))
    (report,) = opened.due(0.1)
    assert report.channel.batcher == "other"


def test_frames_without_a_channel_are_dropped() -> None:
    opened = Channels("worker-1")
    opened.post("b", frames(2))
    assert (opened.backlog, opened.next_due(), opened.get("b", 0)) == (0, None, None)


def test_a_second_channel_replaces_the_first_and_counts_anew() -> None:
    opened = channels()
    (old,) = opened.due(0.0)
    opened.post("b", frames(5))
    assert open_one(opened, opening=1, now=0.1) is old.channel.responses
    (new,) = opened.due(0.1)
    assert (new.report.sequence, len(new.report.frames)) == (0, 0)
    assert not opened.drop(old.channel)
    assert opened.drop(new.channel)
    assert opened.get("b", 1) is None


def test_a_channel_that_a_newer_one_overtook_is_ended() -> None:
    opened = Channels("worker-1")
    open_one(opened, opening=2)
    late = FakePort()
    message = worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, opening=1)
    assert opened.open(message, late, 0.1) is late
    assert opened.get("b", 2) is not None


def test_a_channel_that_the_engine_does_not_serve_yet_carries_heartbeats_only() -> None:
    opened = Channels("worker-1")
    open_one(opened, ready=False)
    opened.post("b", frames(2))
    opened.admit("b", [worker_pb2.Admission(batch_id="old")], 0.0)
    (report,) = reports(opened.due(0.0))
    assert not report.ready
    assert not report.frames
    assert not report.admissions


def test_admissions_come_soon_and_at_once_when_rows_were_refused() -> None:
    opened = channels()
    opened.due(0.0)
    opened.admit("b", [worker_pb2.Admission(batch_id="taken")], 0.1)
    assert opened.next_due() == pytest.approx(0.1 + LOAD_UPDATE_S)
    refusal = worker_pb2.Refusal(request_id="r", retryable=True)
    opened.admit("b", [worker_pb2.Admission(batch_id="not", refused=[refusal])], 0.11)
    (report,) = reports(opened.due(0.11))
    assert [admission.batch_id for admission in report.admissions] == ["taken", "not"]
    assert opened.due(0.2) == []
