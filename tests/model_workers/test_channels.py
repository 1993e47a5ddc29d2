import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.channels import (
    COALESCED_TOKENS_MAX,
    DELAYS,
    REPORT_FRAMES_MAX,
    Channels,
    DueReport,
    Posted,
    ResponseSender,
)
from model_workers.engine.protocol import SequenceStep, TokenLogprobs
from model_workers.grants import Grant
from sluice.internal.v1 import frame_pb2, worker_pb2
from tests.support.ports import FakePort


def frames(count: int, first: int = 0) -> list[Posted]:
    """Of as many rows, which have ended."""
    return [step(f"r{i}", i, ends=True) for i in range(first, first + count)]


def open_one(
    opened: Channels, batcher: str = "b", epoch: int = 0, *, now: float = 0.0, ready: bool = True
) -> ResponseSender | None:
    """Opens a channel with a heartbeat a second; returns the sender of the older one."""
    message = worker_pb2.OpenChannel(batcher=batcher, heartbeat_ms=1000, epoch=epoch)
    older = opened.open(message, FakePort(), now)
    channel = opened.get(batcher, epoch)
    if channel is not None:
        channel.ready = ready
    return older


def channels() -> Channels:
    opened = Channels("worker-1")
    open_one(opened)
    return opened


def reports(due: list[DueReport]) -> list[worker_pb2.StepReport]:
    return [entry.report for entry in due]


@pytest.mark.parametrize(
    ("grant", "delay_s"),
    [
        (Grant([5, 5, 5], is_wanted=True), DELAYS.soon_s),
        (Grant([5, 5, 5], is_wanted=False), DELAYS.update_s),
        (Grant([2, 2, 2], is_wanted=True), DELAYS.update_s),
        (
            Grant([2, 2, 2], batchers=2),
            DELAYS.soon_s,
        ),  # another has the rest, and would send it too
    ],
)
def test_wanted_grants_and_other_batchers_are_reported_soon(grant: Grant, delay_s: float) -> None:
    opened = channels()
    opened.grant("b", Grant([3, 3, 3]), 0.0)
    opened.due(0.1)
    opened.grant("b", grant, 0.2)
    assert opened.next_due() == 0.2 + delay_s
    (report,) = reports(opened.due(0.2 + delay_s))
    assert list(report.task_grants) == grant.tasks


def test_a_renewed_channel_goes_on_where_it_was() -> None:
    opened, first, second = Channels("worker-1"), FakePort(), FakePort()
    opened.open(worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, epoch=3), first, 0.0)
    channel = opened.get("b", 3)
    assert channel is not None
    channel.ready = True
    opened.due(0.0)
    opened.post("b", frames(1), 0.0)
    renewal = worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, epoch=3, renews=True)
    assert opened.open(renewal, second, 0.5) is first
    (due,) = opened.due(0.5)
    assert (due.channel.responses, due.report.sequence) == (second, 1)
    assert len(due.report.frames) == 1


def test_a_channel_that_is_gone_is_not_renewed() -> None:
    opened, port = channels(), FakePort()
    renewal = worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, epoch=7, renews=True)
    assert opened.open(renewal, port, 0.0) is port
    assert opened.get("b", 0) is not None


def test_heartbeats_go_out_with_and_without_frames() -> None:
    opened = channels()
    opened.due(0.0)
    opened.post("b", frames(1), 0.0)
    (report,) = opened.due(0.5)
    assert not report.is_heartbeat
    assert opened.next_due() == 1.0
    (report,) = opened.due(1.0)
    assert report.is_heartbeat
    assert opened.next_due() == 2.0


def test_idle_worker_sends_fewer_heartbeats() -> None:
    opened, load = Channels("worker-1"), worker_pb2.WorkerLoad
    opening = worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, idle_heartbeat_ms=4000)
    opened.open(opening, FakePort(), 0.0)
    opened.due(0.0)
    assert opened.next_due() == 4.0
    opened.set_load(load(running=1), 2.0)
    assert opened.due(2.0 + DELAYS.update_s)
    assert opened.next_due() == 3.0
    opened.set_load(load(), 2.5)
    (report,) = reports(opened.due(3.0))
    assert report.load == load()
    assert opened.next_due() == 7.0


def test_heartbeats_continue_until_the_batch_is_accepted() -> None:
    opened = Channels("worker-1")
    opening = worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, idle_heartbeat_ms=9000)
    opened.open(opening, FakePort(), 0.0)
    made_ready = opened.get("b", 0)
    assert made_ready is not None
    made_ready.ready = True
    opened.due(0.0)
    opened.expect("b", 1, 1.0)  # of another channel
    assert opened.next_due() == 9.0
    opened.expect("b", 0, 2.0)
    for beats_at in (3.0, 4.0):
        assert opened.next_due() == beats_at
        assert opened.due(beats_at)
    opened.admit("b", [worker_pb2.Admission(batch_id="one")], 4.5)
    assert opened.due(4.5 + DELAYS.update_s)
    assert opened.due(5.0)
    assert opened.next_due() == 14.0


def test_load_changes_are_coalesced() -> None:
    opened = channels()
    open_one(opened, "other")
    opened.due(0.0)
    opened.set_load(worker_pb2.WorkerLoad(slots=3, running=1), 0.1)
    opened.post("b", frames(1), 0.0)
    (report,) = opened.due(0.1)
    assert report.channel.batcher == "b"
    opened.set_load(worker_pb2.WorkerLoad(slots=3, running=2), 0.12)
    assert opened.next_due() == pytest.approx(0.1 + DELAYS.update_s)
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
        opened.post("b", frames(count, posted), 0.0)
        posted += count
        assert opened.backlog > 0 or count == 0
        sent += reports(opened.due(0.0))
    while opened.backlog:
        sent += reports(opened.due(0.0))
    assert [report.sequence for report in sent] == list(range(len(sent)))
    assert [f.start_index for report in sent for f in report.frames] == list(range(posted))
    assert max(len(report.frames) for report in sent) <= REPORT_FRAMES_MAX


def test_frames_without_a_channel_are_dropped() -> None:
    opened = Channels("worker-1")
    opened.post("b", frames(2), 0.0)
    assert (opened.backlog, opened.next_due(), opened.get("b", 0)) == (0, None, None)


def test_a_second_channel_replaces_the_first_and_counts_anew() -> None:
    opened = channels()
    (old,) = opened.due(0.0)
    opened.post("b", frames(5), 0.0)
    assert open_one(opened, epoch=1, now=0.1) is old.channel.responses
    (new,) = opened.due(0.1)
    assert (new.report.sequence, len(new.report.frames)) == (0, 0)
    assert not opened.drop(old.channel)
    assert opened.drop(new.channel)
    assert opened.get("b", 1) is None


def test_a_channel_that_a_newer_one_overtook_is_ended() -> None:
    opened = Channels("worker-1")
    open_one(opened, epoch=2)
    late = FakePort()
    message = worker_pb2.OpenChannel(batcher="b", heartbeat_ms=1000, epoch=1)
    assert opened.open(message, late, 0.1) is late
    assert opened.get("b", 2) is not None


def test_unserved_channel_carries_only_heartbeats() -> None:
    opened = Channels("worker-1")
    open_one(opened, ready=False)
    opened.post("b", frames(2), 0.0)
    opened.admit("b", [worker_pb2.Admission(batch_id="old")], 0.0)
    (report,) = reports(opened.due(0.0))
    assert not report.ready
    assert not report.frames
    assert not report.admissions


def test_admissions_come_soon_and_at_once_when_rows_were_refused() -> None:
    opened = channels()
    opened.due(0.0)
    opened.admit("b", [worker_pb2.Admission(batch_id="taken")], 0.1)
    assert opened.next_due() == pytest.approx(0.1 + DELAYS.update_s)
    refusal = worker_pb2.Refusal(request_id="r", retryable=True)
    opened.admit("b", [worker_pb2.Admission(batch_id="not", refused=[refusal])], 0.105)
    (report,) = reports(opened.due(0.105))
    assert [admission.batch_id for admission in report.admissions] == ["taken", "not"]
    assert opened.due(0.2) == []


def step(
    row: str,
    index: int,
    delay_s: float = 0.0,
    *,
    tokens: int = 1,
    attempt: int = 0,
    ends: bool = False,
) -> Posted:
    token_ids = tuple(range(index, index + tokens))
    final = frame_pb2.Final(end=frame_pb2.TASK_END_LENGTH) if ends else None
    return SequenceStep(row, "b", attempt, index, token_ids, delay_s=delay_s), final


def served() -> Channels:
    """A channel that has just sent its heartbeat, at second 10."""
    opened = Channels("worker-1")
    open_one(opened, now=10.0)
    opened.due(10.0)
    return opened


def test_tokens_of_a_row_that_may_wait_come_in_one_frame() -> None:
    opened = served()
    for index in range(20):
        opened.post("b", [step("bulk", index, 0.25)], 10.0 + index / 100)
    assert opened.due(10.2) == []
    assert opened.next_due() == 10.25
    (report,) = reports(opened.due(10.25))
    (frame,) = report.frames
    assert (frame.start_index, frame.token_ids) == (0, list(range(20)))
    assert opened.next_due() == 11.0  # the heartbeat


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(1, 3),
            st.sampled_from([0.0, 0.02, 0.25]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_however_a_row_is_gathered_it_is_the_same(
    posted: list[tuple[str, int, float, bool]],
) -> None:
    opened, lengths, now = served(), {"a": 0, "b": 0}, 10.0
    sent: list[frame_pb2.Frame] = []
    for name, count, delay_s, is_due in posted:
        (one, _), now = step(name, lengths[name], delay_s, tokens=count), now + 0.004
        one.logprobs = tuple(TokenLogprobs(-float(token)) for token in one.token_ids)
        opened.post("b", [(one, None)], now)
        lengths[name] += count
        if is_due:
            sent += [frame for report in reports(opened.due(now)) for frame in report.frames]
    for name, length in lengths.items():
        opened.post("b", [step(name, length, tokens=0, ends=True)], now)
    sent += [frame for report in reports(opened.due(now)) for frame in report.frames]
    for name, length in lengths.items():
        frames_of = [frame for frame in sent if frame.request_id == name]
        assert [frame.HasField("final") for frame in frames_of] == [False] * (
            len(frames_of) - 1
        ) + [True]
        tokens = [token for frame in frames_of for token in frame.token_ids]
        assert tokens == list(range(length))
        assert [-one.logprob for frame in frames_of for one in frame.logprobs] == tokens
        ends = [frame.start_index + len(frame.token_ids) for frame in frames_of]
        assert [frame.start_index for frame in frames_of] == [0, *ends[:-1]]


def test_batchers_hear_of_room_before_they_hear_of_rows() -> None:
    opened = served()
    opened.set_load(worker_pb2.WorkerLoad(running=1, waiting_tokens=5), 10.0)
    assert opened.next_due() == 10.0 + DELAYS.update_s
    opened.set_load(worker_pb2.WorkerLoad(running=1, waiting_tokens=3), 10.0)
    assert opened.next_due() == 10.0 + DELAYS.soon_s
    opened.set_load(worker_pb2.WorkerLoad(running=1), 10.005)
    assert opened.next_due() == 10.005
    opened.due(10.005)
    opened.set_load(worker_pb2.WorkerLoad(), 10.02)
    assert opened.next_due() == 10.02 + DELAYS.soon_s


def test_urgent_frame_is_sent_without_coalesced_ones() -> None:
    opened = served()
    opened.post("b", [step("bulk", 0, 0.25), step("urgent", 0)], 10.0)
    (report,) = reports(opened.due(10.0))
    assert [frame.request_id for frame in report.frames] == ["urgent"]


def test_the_end_of_a_row_brings_its_tokens_soon() -> None:
    opened = served()
    opened.post("b", [step("bulk", 0, 3600.0), step("other", 0, 3600.0)], 10.0)
    opened.post("b", [step("bulk", 1, 3600.0, ends=True)], 10.1)
    assert opened.next_due() == pytest.approx(10.1 + DELAYS.soon_s)
    (report,) = reports(opened.due(10.2))
    (frame,) = report.frames
    assert (frame.request_id, frame.token_ids) == ("bulk", [0, 1])
    assert frame.final.end == frame_pb2.TASK_END_LENGTH


def test_an_end_that_does_not_wait_brings_the_tokens_before_it() -> None:
    opened = served()
    opened.post("b", [step("row", 0, 0.25)], 10.0)
    opened.post("b", [step("row", 1, tokens=0, ends=True)], 10.0)
    (report,) = reports(opened.due(10.0))
    (frame,) = report.frames
    assert (frame.start_index, frame.token_ids) == (0, [0])


def test_a_long_answer_comes_in_pieces() -> None:
    opened = served()
    for index in range(COALESCED_TOKENS_MAX + 1):
        opened.post("b", [step("long", index, 3600.0)], 10.0)
    (report,) = reports(opened.due(10.0 + DELAYS.soon_s))
    assert [len(frame.token_ids) for frame in report.frames] == [COALESCED_TOKENS_MAX]


def test_coalesced_frames_of_attempts_are_not_mixed() -> None:
    opened = served()
    opened.post("b", [step("row", 0, 0.25)], 10.0)
    opened.post("b", [step("row", 0, attempt=1)], 10.0)
    assert opened.next_due() == 10.0
    opened.post("b", [step("row", 1, 0.25, tokens=0, attempt=1, ends=True)], 10.0)
    (report,) = reports(opened.due(10.1))
    (frame,) = report.frames
    assert (frame.attempt, frame.token_ids) == (1, [0])
