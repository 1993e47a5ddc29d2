"""One worker: the engine's thread, the sending thread, and the handling of batchers' requests. Independent of Triton.

The engine's thread executes commands between steps, steps while there are rows, and sleeps otherwise.
"""

import logging
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import Final

from opentelemetry.trace import Tracer

from model_workers import messages
from model_workers.engine.protocol import (
    Engine,
    Refused,
    RowSpec,
    RowStep,
    WorkerUnavailable,
)
from model_workers.messages import row_spec
from model_workers.sender import Channels, ResponseSender, Sender
from model_workers.telemetry import RowTelemetry
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.wire.codec import MalformedMessage

log = logging.getLogger(__name__)

INBOX_MAX: Final = 1024
"""Commands that may wait for the engine's thread."""


@dataclass(frozen=True)
class AdmitCommand:
    """Rows (with their traceparents) to take; ``refused`` rows were invalid. Answered on ``responses``."""

    rows: tuple[tuple[RowSpec, str], ...]
    refused: tuple[worker_pb2.Refusal, ...]
    responses: ResponseSender
    arrived_at: float


@dataclass(frozen=True)
class CancelCommand:
    """Rows of ``batcher`` to stop; answered on ``responses``."""

    batcher: str
    request_ids: tuple[str, ...]
    responses: ResponseSender


@dataclass(frozen=True)
class AbandonCommand:
    """The batcher's channel is gone: the rows it sent before ``at`` (monotonic seconds) are cancelled.

    The batcher may have opened a new channel, and sent rows over it, before this is executed.
    """

    batcher: str
    at: float


Command = AdmitCommand | CancelCommand | AbandonCommand


class InboxFull(Exception):
    """The engine's thread does not keep up, or has ended."""


class EngineLoop:
    """Drives one engine. `submit` and `stop` may be called from any thread, `run` is the thread."""

    def __init__(
        self, engine: Engine, sender: Sender, telemetry: RowTelemetry, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._telemetry = telemetry
        self._clock = clock
        self._inbox: deque[Command] = deque()
        self._changed = Condition()
        self._stopping = False

    def submit(self, command: Command) -> None:
        """Queues a command, to be executed between two steps.

        Raises:
            InboxFull: it was not taken.
        """
        with self._changed:
            if self._stopping or len(self._inbox) >= INBOX_MAX:
                raise InboxFull
            self._inbox.append(command)
            self._changed.notify()

    def stop(self) -> None:
        """Lets `run` return after the step it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Executes commands and steps until `stop`."""
        self._sender.post({}, self._engine.load())
        while self._execute_commands():
            if self._engine.has_rows() and self._sender.has_room():
                self._step()

    def _execute_commands(self) -> bool:
        """Executes the commands of the inbox; sleeps while there are neither commands nor rows. False after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._inbox or self._engine.has_rows())
            commands, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for command in commands:
            self._execute(command)
        return not stopping

    def _execute(self, command: Command) -> None:
        match command:
            case AdmitCommand():
                self._admit(command)
            case CancelCommand():
                mine = set(self._telemetry.owned(command.batcher))
                self._engine.cancel(mine.intersection(command.request_ids))
                self._answer(command.responses, worker_pb2.Admission())
            case AbandonCommand():
                self._engine.cancel(self._telemetry.owned(command.batcher, command.at))

    def _admit(self, batch: AdmitCommand) -> None:
        admission = worker_pb2.Admission(refused=batch.refused)
        for spec, traceparent in batch.rows:
            try:
                self._take(spec, traceparent, batch.arrived_at)
            except Refused as refused:
                admission.refused.append(messages.refusal(spec.request_id, refused))
            else:
                admission.accepted.append(spec.request_id)
        self._answer(batch.responses, admission)

    def _take(self, spec: RowSpec, traceparent: str, arrived_at: float) -> None:
        if not self._sender.has_channel(spec.owner):
            raise WorkerUnavailable("this batcher has no open channel to the worker")
        self._engine.add(spec, arrived_at)
        self._telemetry.accept(spec, traceparent, arrived_at)

    def _answer(self, responses: ResponseSender, admission: worker_pb2.Admission) -> None:
        load = self._engine.load()
        admission.load.CopyFrom(load)
        self._sender.post({}, load)
        self._sender.answer(responses, worker_pb2.WorkerResponse(admission=admission))

    def _step(self) -> None:
        try:
            steps = self._engine.step(self._clock())
        except Exception as error:
            # A fault of one step must not end the worker: its rows fail, later ones may succeed.
            log.exception("a step failed; all rows end")
            steps = self._engine.abort(f"the engine failed: {type(error).__name__}")
        self._report(steps, self._clock())

    def _report(self, steps: list[RowStep], now: float) -> None:
        by_batcher: defaultdict[str, list[frame_pb2.Frame]] = defaultdict(list)
        for step in steps:
            timings = self._telemetry.add_step(step, now)
            by_batcher[step.owner].append(messages.frame(step, timings))
        self._sender.post(by_batcher, self._engine.load())


log = logging.getLogger(__name__)

JOIN_S: Final = 5.0
"""How long `Worker.stop` waits for each of its threads, seconds."""


class Worker:
    """Serves the requests of batchers. ``worker_id`` is new with every start.

    ``on_fault`` is called by a thread that ends by an unexpected exception, after it is logged.
    """

    def __init__(
        self, model: str, engine: Engine, tracer: Tracer, on_fault: Callable[[], None]
    ) -> None:
        self.worker_id = f"{model}-{uuid.uuid4().hex[:8]}"
        clock = time.monotonic
        self._sender = Sender(Channels(self.worker_id), clock, self._lost)
        telemetry = RowTelemetry(tracer, model, self.worker_id)
        self._loop = EngineLoop(engine, self._sender, telemetry, clock)
        self._threads = [
            Thread(target=_guarded, args=(run, on_fault), name=name, daemon=True)
            for name, run in (("engine", self._loop.run), ("sender", self._sender.run))
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the engine after its step, then the channels."""
        for stop, thread in zip((self._loop.stop, self._sender.stop), self._threads, strict=True):
            stop()
            thread.join(JOIN_S)
            if thread.is_alive():
                log.warning("the %s thread did not end within %s s", thread.name, JOIN_S)

    def handle(
        self, request: worker_pb2.WorkerRequest, responses: ResponseSender, traceparent: str = ""
    ) -> None:
        """Handles ``request``; answers go to ``responses``.

        Rows without a traceparent of their own take ``traceparent``.

        Raises:
            MalformedMessage: the request is incomplete; nothing was sent to ``responses``.
        """
        match request.WhichOneof("message"):
            case "open_channel":
                self._open(request.open_channel, responses)
            case "batch":
                self._batch(request.batch, responses, traceparent)
            case "cancel_rows":
                cancel = request.cancel_rows
                self._submit(CancelCommand(cancel.batcher, tuple(cancel.request_ids), responses))
            case _:
                raise MalformedMessage("not a WorkerRequest: no message is set")

    def _open(self, channel: worker_pb2.OpenChannel, responses: ResponseSender) -> None:
        if not channel.batcher or not channel.heartbeat_ms:
            raise MalformedMessage("OpenChannel needs batcher and heartbeat_ms")
        log.info("batcher %s opens a channel", channel.batcher)
        self._sender.open(channel.batcher, responses, channel.heartbeat_ms / 1000)

    def _batch(self, batch: worker_pb2.Batch, responses: ResponseSender, traceparent: str) -> None:
        if not batch.batcher or not batch.rows:
            raise MalformedMessage("Batch needs batcher and rows")
        now = time.monotonic()
        rows: list[tuple[RowSpec, str]] = []
        refused: list[worker_pb2.Refusal] = []
        for row in batch.rows:
            try:
                rows.append((row_spec(row, batch.batcher, now), row.traceparent or traceparent))
            except Refused as refusal:
                refused.append(messages.refusal(row.task.request_id, refusal))
        self._submit(AdmitCommand(tuple(rows), tuple(refused), responses, now))

    def _submit(self, command: AdmitCommand | CancelCommand) -> None:
        try:
            self._loop.submit(command)
        except InboxFull:
            self._sender.answer(
                command.responses, worker_pb2.WorkerResponse(admission=_unavailable(command))
            )

    def _lost(self, batcher: str, at: float) -> None:
        try:
            self._loop.submit(AbandonCommand(batcher, at))
        except InboxFull:
            log.warning("the inbox is full: the rows of a lost batcher are not cancelled")


def _guarded(run: Callable[[], None], on_fault: Callable[[], None]) -> None:
    try:
        run()
    except Exception:
        # The thread would end silently while heartbeats are still sent.
        log.exception("the %s thread ended by a fault", current_thread().name)
        on_fault()


def _unavailable(command: AdmitCommand | CancelCommand) -> worker_pb2.Admission:
    """The answer of a worker that takes no commands now."""
    if isinstance(command, CancelCommand):
        return worker_pb2.Admission()
    error = WorkerUnavailable("the worker is overloaded or closing")
    refused = [messages.refusal(spec.request_id, error) for spec, _ in command.rows]
    return worker_pb2.Admission(refused=[*command.refused, *refused])
