"""The owner of all live requests, without a loop."""

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.dispatch import CANCELS_MAX, Dispatch
from gateway.streaming.idempotency import Replay, ReplayCache
from gateway.streaming.model_run import ModelRun
from gateway.streaming.registry import DEFERRED_MAX, FRAMES_PER_TURN, Registry
from sluice import errors
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame, FrameBundle, TaskError
from sluice.internal.v1.gateway_pb2 import KeyRecord, StoredAnswer
from sluice.settings import ModelSettings
from sluice.v1 import inference_pb2 as pb
from sluice.wire.clock import ms_of
from tests.gateway.kit.batcher import TIMINGS, frame, last
from tests.gateway.kit.runs import BATCHER, Asked, Batchers, confirm, new_run, read, take, words


class Bench:
    """A registry with one way to fill it."""

    def __init__(self, keep_s: float = 60.0) -> None:
        self.notified = 0
        self.dispatch = Dispatch("g", Batchers(BATCHER), 3.0, self._count)
        self.registry = Registry(self.dispatch, ReplayCache(2, keep_s))

    def _count(self, run: ModelRun | None) -> None:
        self.notified += 1

    def stream(
        self,
        name: str = "r1",
        key: str = "",
        stop: str = "",
        now: float = 0.0,
        on_end: Callable[[AnswerStream], None] = lambda _: None,
        priority_class: str = "interactive",
    ) -> AnswerStream:
        spec = Asked(
            event=pb.Started(request_id=name, model="m", prompt_tokens=3),
            arrived_at=now,
            key=key,
            fingerprint=b"f",
        )
        run = new_run(name, stop=stop, now=now, deadline=now + 10, priority_class=priority_class)
        stream = AnswerStream(self.registry, spec, run, on_end)
        self.dispatch.send(run, now)
        self.dispatch.drain(0.0)
        confirm(self.registry, run, now)
        return stream

    def reader(self, stream: AnswerStream, index: int = 0, limit: int = 4) -> int:
        return stream.join(index, limit, lambda: None)

    def take(self, sent: Frame, now: float = 1.0, name: str = "r1") -> None:
        sent.request_id = name
        take(self.registry, sent, now=now)

    def take_now(self, sent: Frame, name: str) -> None:
        """A frame that comes while others wait to be taken."""
        sent.request_id = name
        self.registry.take(FrameBundle(batcher=BATCHER, frames=[sent]), 1.0)

    def words(self) -> dict[str, list[str]]:
        return words(self.dispatch.drain(0.0))


def found(bench: Bench, stream: AnswerStream, now: float) -> bool:
    """Whether the complete answer of ``stream`` can be replayed."""
    replay = bench.registry.find("k", b"f", (), "", now)
    return isinstance(replay, Replay) and replay.finished == stream.finished


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_interactive_frames_of_released_runs_are_not_deferred() -> None:
    bench = Bench()
    urgent = bench.stream("urgent")
    bench.dispatch.release(urgent.current)
    sent = frame(0, ids("a"))
    sent.request_id = "urgent"
    assert not bench.registry.take(FrameBundle(batcher=BATCHER, frames=[sent]), 1.0)


def test_lost_worker_of_many_runs_delays_no_interactive_one() -> None:
    bench = Bench()
    for number in range(1000):
        bench.stream(f"r{number}", priority_class="bulk")
    urgent = bench.stream("urgent")
    lost = [frame(0, [], end=frame_pb2.TASK_END_RETURNED) for _ in range(1000)]
    for number, one in enumerate(lost):
        one.request_id, one.final.return_cause = f"r{number}", frame_pb2.RETURN_CAUSE_WORKER_LOST
    bench.registry.take(FrameBundle(batcher=BATCHER, frames=lost), 1.0)
    bench.take_now(last(0), "urgent")
    assert urgent.has_ended
    sent: list[str] = []
    while bench.registry.take_deferred(1.0):
        pieces = bench.words()["task"]
        assert len(pieces) <= FRAMES_PER_TURN
        sent += pieces
    assert sent + bench.words().get("task", []) == [f"r{number}" for number in range(1000)]


def test_interactive_frames_pass_those_of_a_full_batch() -> None:
    bench = Bench()
    others = [
        bench.stream(f"other-{n}", priority_class="standard") for n in range(FRAMES_PER_TURN + 1)
    ]
    urgent = bench.stream("urgent")
    frames = []
    for stream in (*others, urgent):
        sent = last(0, ids("a"))
        sent.request_id = stream.request_id
        frames.append(sent)
    assert bench.registry.take(FrameBundle(batcher=BATCHER, frames=frames), 1.0)
    assert [stream.has_ended for stream in (*others, urgent)] == [False] * len(others) + [True]
    assert bench.registry.take_deferred(1.0)
    assert [stream.has_ended for stream in others] == [True] * FRAMES_PER_TURN + [False]
    assert not bench.registry.take_deferred(1.0)
    assert others[-1].has_ended


def test_answer_is_read_in_one_delta_and_its_run_is_released() -> None:
    bench = Bench()
    stream = bench.stream()
    reader = bench.reader(stream)
    bench.take(frame(0, ids("ab")))
    bench.take(last(2, ids("c")), now=2)
    delta, finished = read(stream, reader)
    assert delta.delta.text == "abc"
    assert finished.finished.reason == pb.FINISH_REASON_STOP
    assert finished.finished.usage.completion_tokens == 3
    timings = finished.finished.timings
    assert ms_of(timings.queue) == TIMINGS.queue_ms
    assert ms_of(timings.time_to_first_token) == pytest.approx(1000)
    assert ms_of(timings.total) == pytest.approx(2000)
    assert bench.words() == {}
    assert len(bench.registry) == 0


@pytest.mark.parametrize(
    ("end", "reason", "kind"),
    [
        (frame_pb2.TASK_END_FAILED, "ENGINE_FAILED", errors.EngineFailed),
        (frame_pb2.TASK_END_FAILED, "nothing known", errors.EngineFailed),
        (frame_pb2.TASK_END_REFUSED, "", errors.Overloaded),
        (frame_pb2.TASK_END_DEADLINE, "", errors.DeadlinePassed),
        (frame_pb2.TASK_END_CANCELLED, "", errors.Cancelled),
    ],
)
def test_failed_run_ends_with_its_error(
    end: "frame_pb2.TaskEnd.ValueType", reason: str, kind: type[Exception]
) -> None:
    bench = Bench()
    stream = bench.stream()
    reader = bench.reader(stream)
    bench.take(frame(0, end=end, error=TaskError(reason=reason, message="no")))
    with pytest.raises(kind):
        read(stream, reader)
    assert len(bench.registry) == 0


def test_frames_of_unknown_requests_are_answered_with_one_cancel() -> None:
    bench = Bench()
    before = bench.notified
    bench.take(frame(0, ids("a")), name="gone")
    bench.take(frame(1, ids("a")), name="gone")
    assert bench.words() == {"cancel": ["gone"]}
    assert bench.notified == before + 2


def test_frames_of_unknown_requests_do_not_wait() -> None:
    bench = Bench()
    frames = [Frame(request_id=f"gone-{n}", token_ids=[1]) for n in range(2 * CANCELS_MAX)]
    assert not bench.registry.take(FrameBundle(batcher=BATCHER, frames=frames), 1.0)
    assert len(bench.words()["cancel"]) == CANCELS_MAX


def test_deferred_frames_are_bounded_and_requested_again() -> None:
    bench = Bench()
    stream = bench.stream(priority_class="bulk")
    frames = [
        Frame(request_id="r1", start_index=n, token_ids=[97]) for n in range(DEFERRED_MAX + 1)
    ]
    bench.registry.take(FrameBundle(batcher=BATCHER, frames=frames), 1.0)
    while bench.registry.take_deferred(1.0):
        pass
    assert stream.current.next_index == DEFERRED_MAX
    bench.take(Frame(start_index=DEFERRED_MAX + 1, token_ids=[97]))
    assert bench.words() == {"query": ["r1"]}


@pytest.mark.parametrize(("dtype", "is_inexact"), [("auto", False), ("bfloat16", True)])
def test_a_later_attempt_is_noticed_by_the_reader(dtype: Any, is_inexact: bool) -> None:
    bench = Bench()
    stream = bench.stream()
    stream.current.settings = ModelSettings(name="m", path="m", dtype=dtype)
    reader = bench.reader(stream)
    bench.take(frame(0, ids("a")))
    stream.current.start_attempt("batcher")
    bench.take(frame(1, ids("b"), attempt=1))
    event, delta = read(stream, reader)
    (notice,) = event.notices
    assert (notice.kind, notice.inexact) == (pb.NOTICE_KIND_RECOVERED, is_inexact)
    assert ("may differ" in notice.message) == is_inexact
    assert delta.delta.text == "ab"
    assert read(stream, reader) == []


def kept_bytes(*, reads: bool) -> int:
    """How much memory an answer of a thousand tokens takes, read as it comes or not at all."""
    bench = Bench()
    stream = bench.stream()
    reader = bench.reader(stream, limit=10_000)
    frames = [Frame(request_id="r1", start_index=n, token_ids=[97]) for n in range(1000)]
    tracemalloc.start()
    for sent in frames:
        take(bench.registry, sent, now=1.0)
        if reads:
            stream.read(reader)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def test_a_slow_reader_takes_no_more_memory_than_a_fast_one() -> None:
    assert kept_bytes(reads=False) <= kept_bytes(reads=True)


@pytest.mark.parametrize(("dtype", "notices"), [("bfloat16", [True]), ("auto", [])])
def test_caller_that_resumes_learns_of_bfloat16(dtype: Any, notices: list[bool]) -> None:
    bench = Bench()
    stream = bench.stream()
    stream.current.settings = ModelSettings(name="m", path="m", dtype=dtype)
    stream.current.resumed = 1
    reader = bench.reader(stream)
    bench.take(frame(0, ids("ab")))
    bench.take(frame(2, ids("c")))
    events = read(stream, reader)
    assert [one.inexact for event in events for one in event.notices] == notices


def test_one_bad_run_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bad, good = bench.stream("bad"), bench.stream("good")
    reader, other = bench.reader(bad), bench.reader(good)
    bench.take(frame(0, [0x110000]), name="bad")  # no such character
    bench.take(frame(0, ids("a")), name="good")
    with pytest.raises(errors.InternalError):
        read(bad, reader)
    assert read(good, other)[0].delta.text == "a"
    assert "processing a frame of request bad failed" in caplog.text


def test_a_fault_at_the_end_of_one_stream_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: AnswerStream) -> None:
        raise RuntimeError("no record")

    bench = Bench()
    bad, good = bench.stream("bad", on_end=broken), bench.stream("good")
    reader, other = bench.reader(bad), bench.reader(good)
    bench.take(last(0, ids("a")), name="bad")
    bench.take(last(0, ids("b")), name="good")
    assert read(bad, reader)[0].delta.text == "a"
    assert read(good, other)[0].delta.text == "b"
    assert "recording the end of request bad failed" in caplog.text


def test_answers_of_a_tenant_are_forgotten_and_no_others() -> None:
    bench = Bench()
    record = KeyRecord(fingerprint=b"f", answer=StoredAnswer())
    for key in ("acme a", "acmes a"):
        bench.registry.replays.put(key, record, 0.0)
    bench.registry.drop_replays("acme")
    assert bench.registry.find("acme a", b"f", (), "", 1) is None
    assert bench.registry.find("acmes a", b"f", (), "", 1) is not None


def test_the_live_answer_of_a_key_goes_before_a_kept_one() -> None:
    bench = Bench()
    stream = bench.stream(key="k")
    bench.registry.replays.put("k", KeyRecord(fingerprint=b"f", answer=StoredAnswer()), 0.0)
    assert bench.registry.find("k", b"f", (), "", 1) is stream


def test_a_finished_answer_is_found_until_it_is_too_old() -> None:
    bench = Bench(keep_s=5)
    stream = bench.stream(key="k")
    bench.take(last(0, ids("ab")), now=1)
    assert found(bench, stream, 5.9)
    assert not found(bench, stream, 6.1)
    bench.registry.tick(7)
    assert not found(bench, stream, 5.9)


def test_replay_continues_and_keeps_nothing_of_the_call() -> None:
    bench = Bench()
    stream = bench.stream(key="k")
    bench.take(frame(0, ids("ab")))
    bench.take(last(2, ids("c")))
    alive = weakref.ref(stream)
    transcript = weakref.ref(stream.current.transcript)
    replay = bench.registry.find("k", b"f", ids("a"), "", 2)
    assert isinstance(replay, Replay)
    for _ in range(2):
        reader = replay.join(1)
        notice, delta, finished = read(replay, reader)
        assert notice.notices[0].kind == pb.NOTICE_KIND_REPLAYED
        assert (delta.delta.index, delta.delta.text) == (1, "bc")
        assert finished.finished.reason == pb.FINISH_REASON_STOP
    with pytest.raises(errors.InvalidRequest):
        bench.registry.find("k", b"f", ids("x"), "", 2)
    with pytest.raises(errors.IdempotencyConflict):
        bench.registry.find("k", b"other", (), "", 2)
    assert bench.registry.find("", b"f", (), "", 2) is None
    del stream  # it is in no circle
    assert alive() is None
    assert transcript() is None


def test_failing_all_streams_leaves_none_open() -> None:
    bench = Bench()
    stream = bench.stream(key="k")
    reader = bench.reader(stream)
    bench.registry.fail_all(errors.ShuttingDown("bye"))
    with pytest.raises(errors.ShuttingDown):
        read(stream, reader)
    assert len(bench.registry) == 0
    assert bench.registry.find("k", b"f", (), "", 1) is None


@given(st.lists(st.integers(0, 12), max_size=20))
def test_reading_at_any_moment_gives_every_token_once(reads: list[int]) -> None:
    bench = Bench()
    stream = bench.stream()
    reader = bench.reader(stream, limit=100)
    answer, got = "abcdefghijkl", ""
    for index, letter in enumerate(answer):
        sent = last if index == len(answer) - 1 else frame
        bench.take(sent(index, ids(letter)))
        if index in reads:
            got += "".join(event.delta.text for event in read(stream, reader))
    if len(answer) - 1 not in reads:
        got += "".join(event.delta.text for event in read(stream, reader))
    assert got == answer
