"""One worker: an engine, its thread, the sending thread, and what a request asks of them. Knows nothing of Triton."""

import logging
import time
import uuid
from collections.abc import Callable
from threading import Thread, current_thread
from typing import Final

from opentelemetry.trace import Tracer

from model_workers import frames
from model_workers.channel import Channels, Port
from model_workers.door import row_spec
from model_workers.engine.protocol import Engine, Refused, RowSpec, WorkerAway
from model_workers.ledger import Ledger
from model_workers.loop import Abandon, Admit, Cancel, EngineLoop, InboxFull
from model_workers.sender import Sender
from sluice.internal.v1 import worker_pb2
from sluice.wire.codec import MalformedMessage

log = logging.getLogger(__name__)

JOIN_S: Final = 5.0
"""How long `Worker.stop` waits for each of its threads, seconds."""


class Worker:
    """Serves the requests of batchers. ``worker_id`` is new with every start.

    ``on_fault`` is called by a thread that ends through a fault of ours, after it has logged it.
    """

    def __init__(
        self, model: str, engine: Engine, tracer: Tracer, on_fault: Callable[[], None]
    ) -> None:
        self.worker_id = f"{model}-{uuid.uuid4().hex[:8]}"
        clock = time.monotonic
        self._sender = Sender(Channels(self.worker_id), clock, self._lost)
        ledger = Ledger(tracer, model, self.worker_id)
        self._loop = EngineLoop(engine, self._sender, ledger, clock)
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

    def handle(self, request: worker_pb2.WorkerRequest, port: Port, traceparent: str = "") -> None:
        """Does what ``request`` asks; answers go to ``port``.

        Rows without a traceparent of their own take ``traceparent``.

        Raises:
            MalformedMessage: the request makes no sense; nothing was sent to ``port``.
        """
        match request.WhichOneof("message"):
            case "open_channel":
                self._open(request.open_channel, port)
            case "batch":
                self._batch(request.batch, port, traceparent)
            case "cancel_rows":
                cancel = request.cancel_rows
                self._submit(Cancel(cancel.batcher, tuple(cancel.request_ids), port))
            case _:
                raise MalformedMessage("not a WorkerRequest: no message is set")

    def _open(self, channel: worker_pb2.OpenChannel, port: Port) -> None:
        if not channel.batcher or not channel.heartbeat_ms:
            raise MalformedMessage("OpenChannel needs batcher and heartbeat_ms")
        log.info("batcher %s opens a channel", channel.batcher)
        self._sender.open(channel.batcher, port, channel.heartbeat_ms / 1000)

    def _batch(self, batch: worker_pb2.Batch, port: Port, traceparent: str) -> None:
        if not batch.batcher or not batch.rows:
            raise MalformedMessage("Batch needs batcher and rows")
        now = time.monotonic()
        rows: list[tuple[RowSpec, str]] = []
        refused: list[worker_pb2.Refusal] = []
        for row in batch.rows:
            try:
                rows.append((row_spec(row, batch.batcher, now), row.traceparent or traceparent))
            except Refused as refusal:
                refused.append(frames.refusal(row.task.request_id, refusal))
        self._submit(Admit(tuple(rows), tuple(refused), port, now))

    def _submit(self, command: Admit | Cancel) -> None:
        try:
            self._loop.submit(command)
        except InboxFull:
            self._sender.answer(command.port, worker_pb2.WorkerResponse(admission=_away(command)))

    def _lost(self, batcher: str, at: float) -> None:
        try:
            self._loop.submit(Abandon(batcher, at))
        except InboxFull:
            log.warning("the inbox is full: the rows of a lost batcher go on")


def _guarded(run: Callable[[], None], on_fault: Callable[[], None]) -> None:
    try:
        run()
    except Exception:
        # The thread would die without a word, and heartbeats would go on.
        log.exception("the %s thread ended by a fault", current_thread().name)
        on_fault()


def _away(command: Admit | Cancel) -> worker_pb2.Admission:
    """The answer of a worker that takes no commands now."""
    if isinstance(command, Cancel):
        return worker_pb2.Admission()
    away = WorkerAway("the worker is overloaded or closing")
    refused = [frames.refusal(spec.request_id, away) for spec, _ in command.rows]
    return worker_pb2.Admission(refused=[*command.refused, *refused])
