"""A second model's row beside the first one's: whatever comes in whatever order, the answer is one model's and both
rows end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.routing.cascade.monitor import AnswerMonitor
from gateway.streaming.assembler import Assembler
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.cascade_state import COMMITTED, ENDED, KEPT, REROUTED
from gateway.streaming.delivery import Reader
from gateway.streaming.dispatch import Dispatch, SentRow
from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.lifecycle import RequestTimings, StreamSpec, StreamState
from gateway.streaming.registry import Registry
from gateway.streaming.stream import Stream
from gateway.streaming.transcript import Transcript
from sluice.errors import Cancelled, EngineFailed, SluiceError, TransportUnavailable
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import (
    ROW_END_CANCELLED,
    ROW_END_FAILED,
    FrameBundle,
    Logprobs,
    RowError,
    RowRef,
)
from sluice.settings.routing import CascadeRoute
from sluice.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_ESCALATED,
    Started,
)
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.rows import BATCHER, dispatch_to, hold, said, sent_row, take

STALL_S: Final = 3.0
DEADLINE_S: Final = 1000.0
READER_TOKENS: Final = 5
COMMIT: Final = 6
SMALL, LARGE = "abcdefghijkl", "MNOPQRSTUV"
ANSWERS: Final = {"small": SMALL, "large": LARGE}
FIRST, SECOND, THIRD = "r1", "r1-2", "r1-3"


class Letters:
    """A detokenizer for which token 97 is "a"."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class ScriptedCascade:
    """`Cascade` whose bounds the test sets; counts what works for it."""

    speculative = True

    def __init__(self, dispatch: Dispatch, holds: bool = True, stop: str = "") -> None:
        self._dispatch = dispatch
        route = CascadeRoute(first="small", second="large", start="together", commit_tokens=COMMIT)
        self.monitor = AnswerMonitor(route, "prompt", wants_json=False)
        self.holds = holds
        self.refuses = ""
        self.started: list[str] = []
        self.escalated = 0
        self._stop = stop

    def refusal(self, now: float, *, ahead: bool) -> str:
        return self.refuses

    def start(self, draft: str, now: float) -> ModelAttempt:
        self.escalated += 1
        attempt = attempt_of(f"r1-{len(self.started) + 2}", "large", self._stop)
        self.started.append(attempt.row_id)
        self._dispatch.send(sent_row(attempt), now)
        return attempt

    def backup_dropped(self) -> None:
        self.escalated -= 1


def attempt_of(row_id: str, model: str, stop: str = "") -> ModelAttempt:
    transcript = Transcript(Letters(), [stop] if stop else [], frozenset(), chr)
    return ModelAttempt(row_id, model, 3, transcript, Assembler(0, STALL_S, 0.0))


class Bench:
    """One speculative request, and what its batchers hear."""

    def __init__(
        self, holds: bool = True, stop: str = "", refuses: str = "", unread: int = READER_TOKENS
    ) -> None:
        self.dispatch = dispatch_to(stall_s=STALL_S)
        self.cascade = ScriptedCascade(self.dispatch, holds, stop)
        self.cascade.refuses = refuses
        self.registry = Registry(self.dispatch, ReplayCache(2, 60.0))
        self.now = 1.0
        self.ends = 0
        spec = StreamSpec(
            started=Started(request_id=FIRST, model="small"),
            deadline=DEADLINE_S,
            with_logprobs=False,
            timings=RequestTimings(arrived_at=0.0),
            key="k",
        )
        first = attempt_of(FIRST, "small", stop)
        self.stream = self.registry.open(spec, first, self.cascade, on_end=self._count_end)
        self.dispatch.send(sent_row(first), self.now)
        self.registry.start_backup(self.stream, self.now)
        hold(self.registry, FIRST, self.now)
        self.reader = Reader(0, unread, lambda: None)
        self.registry.join(self.stream, self.reader)

    def _count_end(self, stream: Stream) -> None:
        self.ends += 1

    def _count_end(self, stream: Stream) -> None:
        self.ends += 1

    def take(
        self,
        row: str,
        start: int,
        text: str,
        *,
        logprob: float = -0.01,
        end: "frame_pb2.RowEnd.ValueType | None" = None,
        attempt: int = 0,
    ) -> None:
        error = RowError(reason="ENGINE_FAILED") if end == ROW_END_FAILED else None
        sent = frame(
            start,
            [ord(letter) for letter in text],
            attempt=attempt,
            logprobs=[Logprobs(logprob=logprob)] * len(text),
            end=end,
            error=error,
            request_id=row,
        )
        take(self.registry, sent, now=self.now)

    def said(self) -> dict[str, list[str]]:
        """What batchers heard since the last look, new tasks aside: by word, the rows."""
        return {word: rows for word, rows in said(self.dispatch.drain()).items() if word != "task"}

    def text(self) -> str:
        return "".join(event.delta.text for event in self.stream.read(self.reader))


def test_both_begin_and_the_commit_of_the_first_cancels_the_second() -> None:
    bench = Bench()
    assert bench.cascade.started == [SECOND]
    bench.take(SECOND, 0, LARGE[:4])
    bench.take(FIRST, 0, SMALL[: COMMIT - 1])
    assert bench.text() == ""
    assert bench.said() == {}
    bench.take(FIRST, COMMIT - 1, SMALL[COMMIT - 1 : COMMIT])
    assert bench.said()["cancel"] == [SECOND]
    assert bench.cascade.escalated == 0
    assert bench.text() == SMALL[:COMMIT]
    bench.take(FIRST, COMMIT, SMALL[COMMIT:], end=frame_pb2.ROW_END_STOP)
    events = bench.stream.read(bench.reader)
    finished = events[-1].finished
    assert finished.model == "small"
    assert [(leg.model, leg.usage.completion_tokens, leg.unused) for leg in finished.attempts] == [
        ("small", len(SMALL), False),
        ("large", 4, True),
    ]
    assert bench.stream.attempts[1].unused_reason == COMMITTED
    assert bench.ends == 1


def test_an_answer_that_commits_at_its_end_reports_the_unused_model() -> None:
    bench = Bench()
    bench.take(FIRST, 0, SMALL[:3], end=frame_pb2.ROW_END_STOP)
    finished = bench.stream.read(bench.reader)[-1].finished
    assert [leg.unused for leg in finished.attempts] == [False, True]
    assert bench.said() == {"cancel": [SECOND]}


def test_in_doubt_the_second_answer_so_far_is_shown_at_once() -> None:
    bench = Bench()
    bench.take(SECOND, 0, LARGE[:5])
    bench.now = 2.0
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    notice, delta = bench.stream.read(bench.reader)
    assert (notice.notice.kind, notice.notice.model) == (NOTICE_KIND_ESCALATED, "large")
    assert (delta.delta.index, delta.delta.text) == (0, LARGE[:5])
    assert bench.stream.first_token_at == 2.0
    assert bench.said()["cancel"] == [FIRST]
    assert bench.cascade.started == [SECOND]
    bench.take(SECOND, 5, LARGE[5:], end=frame_pb2.ROW_END_STOP)
    assert bench.text() == LARGE[5:]
    assert bench.said() == {}
    assert bench.stream.finished is not None
    assert not any(leg.unused for leg in bench.stream.finished.attempts)


def test_a_second_answer_that_is_complete_ends_the_request_when_the_first_is_in_doubt() -> None:
    bench = Bench()
    bench.take(SECOND, 0, LARGE, end=frame_pb2.ROW_END_STOP)
    assert SECOND not in bench.dispatch
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    assert bench.said() == {"cancel": [FIRST]}
    notice, delta, finished = bench.stream.read(bench.reader)
    assert notice.notice.model == "large"
    assert delta.delta.text == LARGE
    assert finished.finished.reason == FINISH_REASON_STOP
    assert len(bench.registry) == 0


def test_a_stop_string_in_the_second_answer_cancels_its_row_and_waits() -> None:
    bench = Bench(stop="OP")
    bench.take(SECOND, 0, LARGE[:6])
    assert bench.said()["cancel"] == [SECOND]
    bench.take(SECOND, 6, LARGE[6:8])  # on its way when the cancel came
    bench.take(SECOND, 8, "", end=ROW_END_CANCELLED)
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    _, delta, finished = bench.stream.read(bench.reader)
    assert delta.delta.text == "MN"
    assert finished.finished.reason == FINISH_REASON_STOP_SEQUENCE


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_failed_second_row_is_harmless_and_restarts_in_doubt(tokens: int) -> None:
    bench = Bench()
    bench.take(SECOND, 0, LARGE[:tokens])
    bench.take(SECOND, tokens, "", end=ROW_END_FAILED)
    assert bench.said() == {}
    assert bench.cascade.escalated == 0
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    assert bench.cascade.started == [SECOND, THIRD]
    hold(bench.registry, THIRD)
    bench.take(THIRD, 0, LARGE, end=frame_pb2.ROW_END_STOP)
    assert bench.text() == LARGE
    assert bench.stream.finished is not None
    assert [
        (leg.usage.completion_tokens, leg.unused) for leg in bench.stream.finished.attempts
    ] == [
        (4, False),
        (tokens, True),
        (len(LARGE), False),
    ]
    failed = bench.stream.attempts[1]
    assert isinstance(failed.error, EngineFailed)
    assert "ENGINE_FAILED" in failed.unused_reason


def test_where_the_cascade_refuses_the_second_begins_in_doubt() -> None:
    bench = Bench(refuses="too many")
    assert bench.cascade.started == []
    assert bench.stream.current.single_start_reason == "too many"
    bench.cascade.refuses = ""
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    assert bench.cascade.started == [SECOND]


def test_a_second_row_without_tokens_may_be_refused() -> None:
    bench = Bench()
    bench.cascade.refuses = "it would come too late"
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    assert bench.said()["cancel"] == [SECOND]
    assert "too late" in bench.stream.current.kept_reason
    assert bench.stream.attempts[1].unused_reason == KEPT
    assert bench.text() == SMALL[:4]


def test_a_second_row_with_tokens_is_not_refused() -> None:
    bench = Bench()
    bench.cascade.refuses = "no worker is there"
    bench.take(SECOND, 0, LARGE[:1])
    bench.take(FIRST, 0, SMALL[:4], logprob=-5.0)
    assert bench.text() == LARGE[:1]


def test_the_second_answer_replaces_a_failed_first_one() -> None:
    bench = Bench()
    bench.take(SECOND, 0, LARGE[:2])
    bench.take(FIRST, 0, SMALL[:3])
    bench.take(FIRST, 3, "", end=ROW_END_FAILED)
    assert bench.said() == {}
    assert bench.text() == LARGE[:2]
    assert isinstance(bench.stream.attempts[0].error, EngineFailed)
    assert "ENGINE_FAILED" in bench.stream.attempts[0].escalation_reason


def test_a_task_that_was_not_stored_is_lost_unless_frames_prove_it() -> None:
    lost = TransportUnavailable("NATS does not answer")
    bench = Bench()
    bench.registry.publish_failed(SECOND, lost, 1.0)
    assert bench.said()["cancel"] == [SECOND]  # it may have been stored
    assert bench.stream.state is StreamState.WAITING
    other = Bench()
    other.take(SECOND, 0, LARGE[:1])
    other.registry.publish_failed(SECOND, lost, 1.0)
    assert other.said() == {}
    first = Bench()
    first.registry.publish_failed(FIRST, lost, 1.0)  # it has been, by now
    assert not first.stream.ended


def test_both_rows_are_asked_about_when_they_are_silent() -> None:
    bench = Bench()
    bench.take(FIRST, 0, SMALL[:2])
    bench.take(SECOND, 0, LARGE[:3])
    for tick in range(11):
        bench.registry.tick(bench.now + tick * STALL_S / 10)
    assert sorted(bench.said()["ask"]) == [FIRST, SECOND]
    bench.take(FIRST, 2, SMALL[2:COMMIT])
    assert SECOND not in bench.dispatch


def test_an_invalid_frame_of_the_second_row_fails_only_that_row() -> None:
    bench = Bench()
    sent = frame(0, [0x110000], request_id=SECOND)  # no such character
    take(bench.registry, sent, now=1.0)
    assert bench.said()["cancel"] == [SECOND]
    bench.take(FIRST, 0, SMALL, end=frame_pb2.ROW_END_STOP)
    assert bench.text() == SMALL


@pytest.mark.parametrize("way", ["leaves", "deadline", "governed"])
def test_ending_the_request_cancels_both_rows(way: str) -> None:
    bench = Bench()
    bench.take(FIRST, 0, SMALL[:2])
    bench.take(SECOND, 0, LARGE[:2])
    unused = ENDED
    if way == "leaves":
        bench.registry.leave(bench.stream, bench.reader)
    elif way == "deadline":
        bench.registry.tick(DEADLINE_S)
    else:
        assert bench.registry.reroute(bench.stream, attempt_of("r1-r1", "governed"), "guard.g.S1")
        unused = REROUTED
    assert sorted(bench.said()["cancel"]) == [FIRST, SECOND]
    assert bench.cascade.escalated == 0
    assert bench.stream.attempts[1].unused_reason == unused
    assert len(bench.registry) == (way == "governed")


def test_a_caller_that_reconnects_after_an_escalation_holds_no_tokens_of_the_second_answer() -> (
    None
):
    bench = Bench(holds=False)
    bench.take(FIRST, 0, SMALL[:3])
    assert bench.text() == SMALL[:3]
    bench.take(SECOND, 0, LARGE[:4])
    bench.take(FIRST, 3, SMALL[3:5], logprob=-9.0)
    held = [ord(letter) for letter in SMALL[:3]]
    assert bench.registry.find("k", b"", held, "small", 1.0) is bench.stream
    again = Reader(3, READER_TOKENS, lambda: None)
    bench.registry.join(bench.stream, again, "small")
    with pytest.raises(Cancelled):
        bench.stream.read(bench.reader)
    notice, delta = bench.stream.read(again)
    assert notice.notice.model == "large"
    assert delta.delta.text == LARGE[:4]


def test_tokens_of_a_second_row_that_was_never_shown_do_not_match() -> None:
    bench = Bench()
    bench.take(SECOND, 0, LARGE[:4])
    bench.take(FIRST, 0, SMALL[:COMMIT])
    assert not bench.stream.delivery.matches([ord("M")], "large")
    assert bench.stream.delivery.started("large").model == "small"


# --- any order ------------------------------------------------------------------------------------------------------


class Life(Enum):
    """Of a row in its batcher."""

    RUNNING = auto()
    ENDED = auto()
    """Its final frame is out, and is kept."""
    CANCELLED = auto()


@dataclass
class Row:
    """A row in its batcher, which sends frames and obeys."""

    row_id: str
    text: str
    sure: Sequence[bool] = ()
    sent: int = 0
    attempt: int = 0
    life: Life = Life.RUNNING
    end: "frame_pb2.RowEnd.ValueType" = frame_pb2.ROW_END_STOP


class World:
    """A request, its batchers and its caller; everything may go wrong but the gateway."""

    def __init__(self, holds: bool, doubt_at: int) -> None:
        self.bench = Bench(holds, unread=len(SMALL))
        self.sure = [index != doubt_at for index in range(len(SMALL))]
        self.rows: dict[str, Row] = {}
        self.model, self.text, self.tokens = "small", "", list[int]()
        self.done: SluiceError | None = None
        self.finished = ""
        self.obey()

    def obey(self) -> None:
        """Batchers hear what the gateway has to say."""
        outgoing = self.bench.dispatch.drain()
        for _, sent in outgoing.tasks:
            self.rows[sent.row_id] = self.row_of(sent)
            hold(self.bench.registry, sent.row_id, self.bench.now)
        for _, message in outgoing.control:
            for ref in message.cancel.rows:
                self.rows[ref.request_id].life = Life.CANCELLED
            for asked in message.query.rows:
                self.send(self.rows[asked.request_id], asked.next_index)

    def row_of(self, sent: SentRow) -> Row:
        """A batcher takes a task, the first or a later one of its row."""
        task = sent.task
        first = task.request_id == FIRST
        row = Row(task.request_id, SMALL if first else LARGE, self.sure if first else ())
        row.sent, row.attempt = len(task.produced_token_ids), task.attempt
        if row.sent == len(row.text):
            row.life = Life.ENDED
        return row

    def send(self, row: Row, start: int) -> None:
        """All from ``start`` to what has been computed, in one frame."""
        for index in range(start, max(start, row.sent)):
            self._frame(row, index, row.text[index], None)
        if row.life is Life.ENDED:
            self._frame(row, row.sent, "", row.end)

    def step(self, row: Row, count: int, *, lost: bool = False) -> None:
        if row.life is not Life.RUNNING:
            return
        start, row.sent = row.sent, min(len(row.text), row.sent + count)
        if row.sent == len(row.text):
            row.life = Life.ENDED
        if not lost:
            self.send(row, start)

    def fail(self, row: Row) -> None:
        if row.life is Life.RUNNING:
            row.life, row.end = Life.ENDED, ROW_END_FAILED
            self._frame(row, row.sent, "", row.end)

    def move(self, row: Row) -> None:
        """Its batcher has lost it: another one gets the task."""
        unknown = RowRef(request_id=row.row_id, attempt=row.attempt)
        bundle = FrameBundle(batcher=BATCHER, unknown=[unknown])
        self.bench.registry.take(bundle, self.bench.now)
        self.obey()

    def read(self) -> None:
        if self.done is not None or self.finished:
            return
        try:
            for event in self.bench.stream.read(self.bench.reader):
                if event.HasField("notice") and event.notice.kind == NOTICE_KIND_ESCALATED:
                    assert not (self.bench.cascade.holds and self.text), "held text was shown"
                    self.model, self.text, self.tokens = event.notice.model, "", []
                if event.HasField("delta"):
                    assert event.delta.index == len(self.tokens)
                    self.text += event.delta.text
                    self.tokens += event.delta.token_ids
                if event.HasField("finished"):
                    self.finished = event.finished.model
        except SluiceError as error:
            self.done = error
        assert ANSWERS[self.model].startswith(self.text)

    def reconnect(self) -> None:
        """The call breaks, and the caller comes back with what it holds."""
        if self.done is not None or self.finished or self.bench.stream.error is not None:
            return
        registry, stream = self.bench.registry, self.bench.stream
        found = registry.find("k", b"", self.tokens, self.model, self.bench.now)
        assert found is stream
        self.bench.reader = Reader(len(self.tokens), len(SMALL), lambda: None)
        registry.join(stream, self.bench.reader, self.model)

    def settle(self) -> None:
        """Nothing goes wrong any more."""
        for _ in range(30):
            for row in list(self.rows.values()):
                self.step(row, 3)
                self.obey()
                self.read()
            for _ in range(11):
                self.bench.now += STALL_S / 10
                self.bench.registry.tick(self.bench.now)
            self.obey()
            self.read()

    def _frame(
        self, row: Row, start: int, text: str, end: "frame_pb2.RowEnd.ValueType | None"
    ) -> None:
        sure = not row.sure or not text or row.sure[start]
        logprob = -0.01 if sure else -60.0
        self.bench.take(row.row_id, start, text, logprob=logprob, end=end, attempt=row.attempt)


STEPS: Final = ("first", "second", "read", "reconnect", "obey")
FAULTS: Final = ("lose first", "lose second", "fail second", "move first", "move second", "repeat")


@given(
    holds=st.booleans(),
    doubt_at=st.integers(0, len(SMALL)),
    steps=st.lists(st.sampled_from((*STEPS, *STEPS, *FAULTS, "fail first", "leave")), max_size=40),
)
def test_in_any_order_the_answer_is_of_one_model_and_every_row_ends(
    holds: bool, doubt_at: int, steps: list[str]
) -> None:
    world = World(holds, doubt_at)
    bench, left, failed = world.bench, False, False
    for step in steps:
        first, second = world.rows[FIRST], list(world.rows.values())[-1]
        match step.split():
            case ["first"]:
                world.step(first, 1)
            case ["second"] if second is not first:
                world.step(second, 1)
            case ["lose", which]:
                world.step(first if which == "first" else second, 1, lost=True)
            case ["fail", which]:
                failed = True
                world.fail(first if which == "first" else second)
            case ["move", which]:
                world.move(first if which == "first" else second)
            case ["repeat"]:
                world.send(second, 0)
            case ["read"]:
                world.read()
            case ["reconnect"]:
                world.reconnect()
            case ["obey"]:
                world.obey()
            case ["leave"]:
                left = True
                bench.registry.leave(bench.stream, bench.reader)
    world.settle()
    assert len(bench.registry) == 0
    assert all(row.life is not Life.RUNNING for row in world.rows.values()), world.rows
    assert not any(row_id in bench.dispatch for row_id in world.rows)
    assert bench.ends == 1
    assert len({leg.row_id for leg in bench.stream.attempts}) == len(bench.stream.attempts)
    assert [leg.row_id for leg in bench.stream.attempts[1:]] == bench.cascade.started
    escalated = bench.stream.current.model == "large"
    assert bench.cascade.escalated == escalated
    if bench.stream.finished is not None and not left:
        assert world.finished == bench.stream.finished.model
        assert world.text == ANSWERS[world.finished]
        assert world.finished == "large" or doubt_at >= COMMIT or bench.stream.current.kept_reason
    elif not left:
        assert failed
        assert isinstance(bench.stream.error, EngineFailed)


def test_the_checker_detects_errors() -> None:
    """The world notices text of two models in one answer."""
    world = World(holds=False, doubt_at=len(SMALL))
    world.step(world.rows[FIRST], 2)
    world.read()
    world.text += "M"
    with pytest.raises(AssertionError):
        world.read()
