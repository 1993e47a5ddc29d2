"""Runs at a batcher that the test plays, without a loop."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import override

from gateway.identity.resume_token import ResumeKey, ResumeToken
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.capacity import BatcherCapacity
from gateway.streaming.dispatch import Dispatch, Outgoing
from gateway.streaming.idempotency import Replay
from gateway.streaming.load_table import ModelLoadTable
from gateway.streaming.model_run import ModelRun, RunClass
from gateway.streaming.registry import Registry
from gateway.streaming.transcript import Transcript
from sluice.internal.v1.frame_pb2 import Frame, FrameBundle, TaskRef, TaskTimings
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import ModelSettings
from sluice.v1.inference_pb2 import GenerateResponse, Started, Timings
from sluice.wire.clock import duration
from tests.support.events import events_in

BATCHER: Final = "b1"
RESUME_KEY: Final = ResumeKey("secret")
STALL_S: Final = 3.0


class Batchers(ModelLoadTable):
    """Batchers of the names and with the capacity that the test sets."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.capacity = BatcherCapacity(1000, 1e9)

    @override
    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        return next((name for name in self.names if name not in without), None)

    @override
    def capacities(self, run_class: RunClass, now: float) -> dict[str, BatcherCapacity]:
        return dict.fromkeys(self.names, self.capacity)


@dataclass
class Asked:
    """`gateway.streaming.answer_stream.AnsweredRequest`."""

    event: Started = field(default_factory=Started)
    arrived_at: float = 0.0
    key: str = ""
    fingerprint: bytes = b""
    with_logprobs: bool = False

    def timings(
        self, run: TaskTimings, queued_s: float, first_token_at: float, now: float
    ) -> Timings:
        return Timings(
            publish=duration(queued_s * 1000),
            queue=duration(run.queue_ms),
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


def new_run(
    run_id: str = "r1",
    model: str = "m",
    *,
    stop: str = "",
    stall_s: float = STALL_S,
    now: float = 0.0,
    prompt_tokens: int = 3,
    detokenizer: Any = None,
    deadline: float = 1e6,
    **task: Any,
) -> ModelRun:
    stops = [stop] if stop else []
    fields = {
        "gateway": "g",
        "priority_class": "interactive",
        "prompt_token_ids": [1, 2, 3],
        **task,
    }

    def open_transcript() -> Transcript:
        return Transcript(detokenizer or Letters(), stops, frozenset(), chr)

    return ModelRun(
        Task(request_id=run_id, model=model, **fields),
        model,
        ModelSettings(name=model, path=model),
        prompt_tokens,
        open_transcript,
        deadline,
        stall_s,
        now,
    )


def dispatch_to(*batchers: str, stall_s: float = STALL_S) -> Dispatch:
    return Dispatch("g", Batchers(*(batchers or (BATCHER,))), stall_s, lambda _: None)


def confirm(registry: Registry, run: ModelRun, now: float = 0.0, batcher: str = BATCHER) -> None:
    """A batcher says that it has a run."""
    held = [TaskRef(request_id=run.run_id, attempt=run.attempt_number)]
    registry.take(FrameBundle(batcher=batcher, pending=held), now)


def take(registry: Registry, *frames: Frame, now: float, batcher: str = BATCHER) -> None:
    """Frames of a batcher."""
    registry.take(FrameBundle(batcher=batcher, frames=frames), now)
    while registry.take_deferred(now):
        pass


def words(outgoing: Outgoing) -> dict[str, list[str]]:
    """What is sent to batchers: by kind of message, the runs."""
    runs: dict[str, list[str]] = {"task": [run.run_id for _, run in outgoing.tasks]}
    runs["cancel"], runs["query"] = [], []
    for _, message in outgoing.control:
        runs["cancel"] += [ref.request_id for ref in message.cancel.tasks]
        runs["query"] += [asked.request_id for asked in message.query.tasks]
    return {kind: names for kind, names in runs.items() if names}


def read(answer: AnswerStream | Replay, reader: int) -> list[GenerateResponse]:
    """The events that the reader has not had, each in a message of its own."""
    response = answer.read(reader)
    return [] if response is None else list(events_in(response))
