"""Rows at a batcher that the test plays, without a loop."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.identity.resume_token import ResumeKey, ResumeToken
from gateway.streaming.answer import Answer, Reader
from gateway.streaming.dispatch import Dispatch, Outgoing
from gateway.streaming.idempotency import Replay
from gateway.streaming.registry import Registry
from gateway.streaming.room import Line, Room, SentRow, line_of
from gateway.streaming.row import Row
from gateway.streaming.transcript import Transcript
from sluice.internal.v1.frame_pb2 import Frame, FrameBundle, TaskRef, TaskTimings
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import ModelSettings
from sluice.v1.inference_pb2 import GenerateResponse, Started, Timings
from sluice.wire.clock import duration
from tests.support.events import events_in

BATCHER: Final = "b1"
RESUME_KEY: Final = ResumeKey("secret")


class Batchers:
    """`gateway.streaming.dispatch.Batchers` of the names that the test sets."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.room = Room(1000, 1e9)

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        return next((name for name in self.names if name not in without), None)

    def rooms(self, line: Line, now: float) -> Mapping[str, Room]:
        return dict.fromkeys(self.names, self.room)


@dataclass
class Asked:
    """`gateway.streaming.answer.AnsweredRequest`."""

    event: Started = field(default_factory=Started)
    deadline: float = 10.0
    tenant: str = "t"
    priority_class: str = "interactive"
    arrived_at: float = 0.0
    key: str = ""
    fingerprint: bytes = b""
    with_logprobs: bool = False

    def timings(self, row: TaskTimings, first_token_at: float, now: float) -> Timings:
        return Timings(
            queue=duration(row.queue_ms),
            time_to_first_token=duration((first_token_at - self.arrived_at) * 1000),
            total=duration((now - self.arrived_at) * 1000),
        )

    def started(self) -> Started:
        started = Started()
        started.CopyFrom(self.event)
        return started

    def resume_token(self, model: str) -> ResumeToken:
        return RESUME_KEY.token(b"f", model, 4)


class Letters:
    """A detokenizer for which token 97 is "a"."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def new_row(
    row_id: str = "r1",
    model: str = "m",
    *,
    stop: str = "",
    stall_s: float = 3.0,
    now: float = 0.0,
    prompt_tokens: int = 3,
    detokenizer: Any = None,
) -> Row:
    stops = [stop] if stop else []

    def open_text() -> Transcript:
        return Transcript(detokenizer or Letters(), stops, frozenset(), chr)

    settings = ModelSettings(name=model, path=model)
    return Row(row_id, model, prompt_tokens, open_text, stall_s, now, settings)


def dispatch_to(*batchers: str, stall_s: float) -> Dispatch:
    return Dispatch("g", Batchers(*(batchers or (BATCHER,))), stall_s, interval_ms=20)


def sent_row(attempt: Row, deadline: float = 1e6, priority_class: str = "interactive") -> SentRow:
    task = Task(
        request_id=attempt.row_id,
        gateway="g",
        model=attempt.model,
        priority_class=priority_class,
        prompt_token_ids=[1, 2, 3],
    )
    row = SentRow(task, {}, attempt, deadline)
    row.line = line_of(task.model, task.priority_class)
    return row


def hold(registry: Registry, row_id: str, now: float = 0.0, batcher: str = BATCHER) -> None:
    """A batcher says that it has a row."""
    attempt = registry.dispatch._rows[row_id].task.attempt
    held = [TaskRef(request_id=row_id, attempt=attempt)]
    registry.take(FrameBundle(batcher=batcher, pending=held), now)


def take(registry: Registry, *frames: Frame, now: float, batcher: str = BATCHER) -> None:
    """Frames of a batcher."""
    registry.take(FrameBundle(batcher=batcher, frames=frames), now)
    while registry.take_more(now):
        pass


def said(outgoing: Outgoing) -> dict[str, list[str]]:
    """What batchers are told: by word, the rows."""
    told: dict[str, list[str]] = {"task": [row.task.request_id for _, row in outgoing.tasks]}
    told["cancel"], told["ask"] = [], []
    for _, message in outgoing.control:
        told["cancel"] += [ref.request_id for ref in message.cancel.tasks]
        told["ask"] += [asked.request_id for asked in message.query.tasks]
    return {word: rows for word, rows in told.items() if rows}


def read(answer: Answer | Replay, reader: Reader) -> list[GenerateResponse]:
    """The events that the reader has not had, each in a message of its own."""
    response = answer.read(reader)
    return [] if response is None else list(events_in(response))
