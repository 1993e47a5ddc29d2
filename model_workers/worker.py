"""One worker: the engine's thread, the sender's thread, and the handling of batchers' requests. Independent of Triton.

The engine's thread executes commands between steps, steps while there are sequences, and sleeps otherwise.

A sequence whose workers were lost again and again is computed alone the last time (`Task.last_try`): the worker returns
all others, grants nothing, and accepts nothing until that sequence has a token or has ended. It waits `ALONE_S` before
the step, so that batchers know that the sequence is alone. Only then is a loss of the worker blamed on the sequence.
"""

import logging
import math
import os
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Condition, Thread, current_thread
from typing import Final

from opentelemetry.trace import Tracer

from model_workers import messages
from model_workers.channels import Channels, Posted, ResponseSender
from model_workers.engine.protocol import Engine, SequenceEnd, SequenceSpec, SequenceStep
from model_workers.grants import Grants
from model_workers.sender import Sender
from model_workers.telemetry import SequenceTelemetry
from model_workers.watchdog import Watchdog
from sluice.errors import Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.startup import ENGINE_NICE
from sluice.wire.codec import MalformedMessage

INBOX_MAX: Final = 1024
"""Maximum number of commands that wait for the engine's thread."""
ALONE_S: Final = 0.1
"""Time between isolating a sequence and its step, in seconds; longer than reports delay ends, admissions and grants."""
FAULTS_MAX: Final = 3
"""Number of steps that raise in succession at which the worker gives up: its device may be lost."""
JOIN_S: Final = 5.0
"""How long `Worker.stop` waits for each thread, in seconds."""

Command = Callable[[], None]
"""What the engine's thread does between two steps."""

logger = logging.getLogger(__name__)


class InboxFull(Exception):
    """The engine's thread is too slow, or the worker is stopping."""


def notify(changed: Condition) -> None:
    """Let the engine's thread look for work that came through no command; from any thread."""
    with changed:
        changed.notify()


class Worker:
    """Serves the requests of batchers. `_compute` is the engine's thread; it executes the commands of the others.

    Attributes:
        worker_id: New with every start.
    """

    def __init__(
        self,
        model: str,
        engine: Engine,
        tracer: Tracer,
        on_fault: Callable[[], None],
        changed: Condition | None = None,
        *,
        isolates: bool = True,
        inbox_max: int = INBOX_MAX,
        alone_s: float = ALONE_S,
    ) -> None:
        """Create a worker that is not started.

        - `on_fault`: Called on a thread of the worker after an exception that ends it was logged, and while the engine
          does not recover from hanging.
        - `changed`: The engine's thread waits on it; see `notify`.
        - `isolates`: Whether sequences are computed in this process, so that one may end the others with it. Then the
          engine's thread gets the priority in the variable `ENGINE_NICE`.
        - `inbox_max`: See `INBOX_MAX`.
        - `alone_s`: See `ALONE_S`.
        """
        self.worker_id = f"{model}-{uuid.uuid4().hex[:8]}"
        self._on_fault = on_fault
        self._engine = engine
        self._watchdog = Watchdog()
        self._telemetry = SequenceTelemetry(tracer, model, self.worker_id)
        channels = Channels(self.worker_id, self._telemetry.counts)
        self._sender = Sender(channels, self._watchdog, time.monotonic, self._on_lost, on_fault)
        self._grants = Grants()
        self._changed = changed or Condition()
        self._isolates, self._inbox_max, self._alone_s = isolates, inbox_max, alone_s
        self._inbox: deque[Command] = deque()
        self._admissions: defaultdict[str, list[worker_pb2.Admission]] = defaultdict(list)
        """Admissions since the last report, by batcher."""
        self._alone = ""
        """Request id of the sequence that is computed alone."""
        self._begins_at = -math.inf
        """No step is computed before this time."""
        self._stopping = False
        self._faults = 0
        engine_priority = int(os.environ.get(ENGINE_NICE, "0")) if isolates else 0
        self._threads = (
            Thread(target=self._run_engine, args=(engine_priority,), name="engine", daemon=True),
            Thread(target=self._guarded, args=(self._sender.run,), name="sender", daemon=True),
        )

    def start(self) -> None:
        """Start to work."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the engine after its step, then the channels."""
        self._stopping = True
        notify(self._changed)
        engine, sender = self._threads
        _join(engine)
        self._sender.stop()
        _join(sender)

    def _run_engine(self, priority: int) -> None:
        # Linux counts the priority of each thread; 0 is the calling thread. The threads that receive tasks and send
        # frames then do not wait for this one; the threads of torch that it starts give way as well.
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, priority))
        self._guarded(self._compute)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            # The thread would end silently while heartbeats are still sent.
            logger.exception("the %s thread ended by a fault", current_thread().name)
            self._on_fault()

    def handle(
        self, request: worker_pb2.WorkerRequest, responses: ResponseSender, traceparent: str = ""
    ) -> None:
        """Queue a request. The responses of a channel go to `responses`; other requests end without one.

        This never waits for the engine, whose steps may be long. Tasks without a traceparent get `traceparent`.

        Raises:
            MalformedMessage: The request is incomplete; nothing was sent to `responses`.
            InboxFull: The request was not queued, and nothing was sent to `responses`. A new channel is open anyway,
                and may have sent a heartbeat.
        """
        batch = None
        match request.WhichOneof("message"):
            case "open_channel":
                self._open(request.open_channel, responses)
                return
            case "batch":
                batch = request.batch
                self._submit(partial(self._admit, *_checked(batch, traceparent)))
            case "cancel_tasks":
                cancel = request.cancel_tasks
                attempts = {ref.request_id: ref.attempt for ref in cancel.tasks}
                self._submit(partial(self._cancel, cancel.batcher, attempts))
            case "demand":
                demand = request.demand
                queued = tuple(demand.queued)
                self._submit(partial(self._demand, demand.batcher, demand.epoch, queued))
            case _:
                raise MalformedMessage("WorkerRequest has no message")
        self._sender.end(responses, batch)

    def _open(self, channel: worker_pb2.OpenChannel, responses: ResponseSender) -> None:
        if not channel.batcher or not channel.heartbeat_ms:
            raise MalformedMessage("OpenChannel needs batcher and heartbeat_ms")
        self._sender.open(channel, responses)
        if not channel.renews:
            logger.info("batcher %s opened a channel (epoch %d)", channel.batcher, channel.epoch)
            self._submit(partial(self._serve, channel))

    def _on_lost(self, batcher: str, at: float) -> None:
        try:
            self._submit(partial(self._abandon, batcher, at))
        except InboxFull:
            logger.warning("sequences of lost batcher %s are not cancelled: inbox full", batcher)

    def _compute(self) -> None:
        """Execute commands and steps until `stop`; the engine's thread."""
        load = self._load()
        self._sender.post({}, load)
        while (commands := self._next_commands()) is not None:
            # Commands first: a cancel or a new sequence changes what the step computes.
            if commands:
                load = self._execute(commands)
            if self._is_due() and self._sender.has_capacity():
                load = self._step(load)

    def _submit(self, command: Command) -> None:
        """Queue a command for execution between two steps.

        Raises:
            InboxFull: The command was not queued.
        """
        with self._changed:
            if self._stopping or len(self._inbox) >= self._inbox_max:
                raise InboxFull("the worker is overloaded or closing")
            self._inbox.append(command)
            self._changed.notify()

    def _is_due(self) -> bool:
        """Return whether there is a step to compute now."""
        return self._engine.has_sequences() and time.monotonic() >= self._begins_at

    def _next_commands(self) -> Sequence[Command] | None:
        """Sleep until there are commands or a step is due; return the commands, or None after `stop`."""
        until_begin_s = self._begins_at - time.monotonic()
        timeout_s = until_begin_s if until_begin_s > 0 else None
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._inbox or self._is_due(), timeout_s
            )
            commands, self._inbox = self._inbox, deque()
            return None if self._stopping else commands

    def _execute(self, commands: Sequence[Command]) -> worker_pb2.WorkerLoad:
        # A command may hang too: the watchdog gives it the time of a step without tokens.
        self._watchdog.begin(0, time.monotonic())
        for command in commands:
            command()
        load = self._load()
        grants = self._grants.give(load, time.monotonic(), self._telemetry.owners())
        self._sender.post({}, load, self._admissions, grants)
        self._admissions.clear()
        self._watchdog.end(time.monotonic(), is_step=False)
        return load

    def _load(self) -> worker_pb2.WorkerLoad:
        load = self._engine.load()
        load.batches = self._telemetry.batches
        return load

    def _serve(self, channel: worker_pb2.OpenChannel) -> None:
        """Serve the new channel of a batcher; cancel the sequences of the channel before it."""
        batcher, epoch = channel.batcher, channel.epoch
        # The channel may have been replaced again while the command was queued.
        if self._sender.has_channel(batcher, epoch):
            self._engine.cancel([spec.request_id for spec in self._telemetry.owned(batcher)])
            self._grants.open(batcher, epoch, channel.heartbeat_ms / 1000)
            self._sender.make_ready(batcher, epoch)

    def _cancel(self, batcher: str, attempts: Mapping[str, int]) -> None:
        """Cancel sequences of a batcher; `attempts` has the highest attempt number to cancel by request."""
        owned = self._telemetry.owned(batcher)
        self._engine.cancel(
            [spec.request_id for spec in owned if spec.attempt <= attempts.get(spec.request_id, -1)]
        )

    def _abandon(self, batcher: str, at: float) -> None:
        """Cancel what a batcher sent before its channel was lost at `at`, in monotonic seconds.

        By now the batcher may have opened a new channel and sent sequences over it.
        """
        owned = self._telemetry.owned(batcher, at)
        self._engine.cancel([spec.request_id for spec in owned])
        if not self._sender.has_channel(batcher, self._grants.epoch(batcher)):
            self._grants.close(batcher)

    def _demand(self, batcher: str, epoch: int, queued: Sequence[int]) -> None:
        """Note how many tasks a batcher has queued, by class."""
        if epoch == self._grants.epoch(batcher):
            self._grants.set_queued(batcher, queued, time.monotonic())

    def _admit(
        self,
        batch: worker_pb2.Batch,
        sequences: Sequence[SequenceSpec],
        refused: Sequence[worker_pb2.Refusal],
        arrived_at: float,
    ) -> None:
        """Add the valid sequences of a batch to the engine; `refused` are the invalid tasks."""
        # The channel was lost meanwhile: its batcher sends these tasks elsewhere.
        if not self._sender.has_channel(batch.batcher, batch.epoch):
            return
        admission = worker_pb2.Admission(batch_id=batch.batch_id, refused=refused)
        self._grants.take(batch, arrived_at)
        for spec in sequences:
            # One refused task does not affect the others of its batch.
            try:
                self._add(spec, arrived_at)
            except SluiceError as error:
                admission.refused.append(messages.refusal(spec.request_id, error))
            else:
                self._accept(spec, arrived_at)
        self._admissions[batch.batcher].append(admission)

    def _accept(self, spec: SequenceSpec, arrived_at: float) -> None:
        replaced = self._telemetry.accept(spec, arrived_at)
        if replaced is not None and replaced.spec.owner != spec.owner:
            # Its batcher would wait for frames, and count it among its tasks here.
            end = replaced.spec.ended(SequenceEnd.CANCELLED, tokens=replaced.tokens)
            posted = [(end, messages.final(end))]
            self._sender.post({replaced.spec.owner: posted}, self._load())

    def _add(self, spec: SequenceSpec, arrived_at: float) -> None:
        if self._alone:
            raise Overloaded("a sequence is computed alone; send this one elsewhere")
        if spec.last_try and self._isolates:
            self._isolate(spec)
        try:
            self._engine.add(spec, arrived_at)
        except SluiceError:
            self._end_isolation(spec.request_id)
            raise

    def _isolate(self, spec: SequenceSpec) -> None:
        """Return all sequences, so that `spec` is computed alone."""
        # From here on nothing is granted, until the sequence has a token or has ended.
        self._alone = spec.request_id
        self._grants.withdrawn = True
        now = time.monotonic()
        self._begins_at = now + self._alone_s
        # NOT_ACCEPTED: their gateways do not count this as a loss of the worker.
        steps = self._engine.abort("another sequence is computed alone")
        self._report(steps, now, frame_pb2.RETURN_CAUSE_NOT_ACCEPTED)

    def _end_isolation(self, request_id: str) -> None:
        """Accept others again if this is the sequence that is computed alone."""
        if request_id == self._alone:
            self._alone, self._grants.withdrawn = "", False

    def _step(self, load: worker_pb2.WorkerLoad) -> worker_pb2.WorkerLoad:
        """Compute one step; `load` is the load before it. Return the load after it."""
        began_at = time.monotonic()
        self._watchdog.begin(load.running + load.waiting + load.waiting_tokens, began_at)
        try:
            steps = self._engine.step(began_at)
            self._faults = 0
        except Exception as error:
            self._faults += 1
            # The exception ends the thread, and with it the process; the supervisor starts a new one.
            if self._faults == FAULTS_MAX:
                raise
            # One fault does not end the worker: its sequences go elsewhere, later ones may succeed.
            logger.exception("step failed, returning all sequences")
            steps = self._engine.abort(f"the engine failed: {type(error).__name__}")
        now = time.monotonic()
        self._watchdog.end(now, is_step=True)
        self._telemetry.count_step(now - began_at)
        return self._report(steps, now)

    def _report(
        self,
        steps: Sequence[SequenceStep],
        now: float,
        cause: "frame_pb2.ReturnCause.ValueType" = frame_pb2.RETURN_CAUSE_UNSPECIFIED,
    ) -> worker_pb2.WorkerLoad:
        """Post steps to their batchers, their ends with `cause`; return the load."""
        by_batcher: defaultdict[str, list[Posted]] = defaultdict(list)
        for step in steps:
            timings, final = self._telemetry.add_step(step, now), None
            if step.end is not None:
                final = messages.final(step, timings)
                final.return_cause = cause
            by_batcher[step.owner].append((step, final))
            # Any step of the isolated sequence shows that it does not end the worker.
            self._end_isolation(step.request_id)
        load = self._load()
        grants = self._grants.give(load, now, self._telemetry.owners())
        self._sender.post(by_batcher, load, grants=grants)
        return load


def _join(thread: Thread) -> None:
    thread.join(JOIN_S)
    if thread.is_alive():
        logger.warning("the %s thread did not end within %s s", thread.name, JOIN_S)


def _checked(
    batch: worker_pb2.Batch, traceparent: str
) -> tuple[worker_pb2.Batch, list[SequenceSpec], list[worker_pb2.Refusal], float]:
    """Return the arguments of `Worker._admit` for a batch that arrives now."""
    if not batch.batcher or not batch.tasks:
        raise MalformedMessage("Batch needs batcher and tasks")
    now = time.monotonic()
    sequences: list[SequenceSpec] = []
    refused: list[worker_pb2.Refusal] = []
    for task in batch.tasks:
        try:
            parent = task.traceparent or traceparent
            spec = messages.sequence_spec(task, batch.batcher, now, batch.batch_id, parent)
            sequences.append(spec)
        except SluiceError as error:
            refused.append(messages.refusal(task.task.request_id, error))
    return batch, sequences, refused, now
