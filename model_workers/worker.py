"""One worker: the engine's thread, the sending thread, and the handling of batchers' requests. Independent of Triton.

The engine's thread executes commands between steps, steps while there are sequences, and sleeps otherwise.

A sequence that was lost with its worker again and again is tried alone the last time (`Task.last_try`): the worker returns
all others, grants nobody room, and takes no other sequence before that one has a token or has ended. It waits `ALONE_S`
before the step, so that the batcher hears that the sequence is alone: only then is a loss of the worker the sequence's.
"""

import logging
import math
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from opentelemetry.trace import Tracer

from model_workers import messages
from model_workers.engine.protocol import Engine, EngineFull, Refused, SequenceSpec, SequenceStep
from model_workers.grants import Grants
from model_workers.messages import sequence_spec
from model_workers.runners import Changes, Runner, Threads
from model_workers.running_batches import RunningBatches
from model_workers.sender import Channels, Posted, ResponseSender, Sender
from model_workers.telemetry import HOLD_S, Parents, SequenceTelemetry
from model_workers.watchdog import Watchdog
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.wire.codec import MalformedMessage

log = logging.getLogger(__name__)

INBOX_MAX: Final = 1024
"""Commands that may wait for the engine's thread."""
ALONE_S: Final = 0.1
"""How long before its step a sequence is alone, seconds."""
FAULTS_MAX: Final = 3
"""An engine whose steps raise so many times in succession is given up: its device may be lost."""


Command = Callable[[], None]
"""Something that the engine's thread does between two steps."""

Admitted = tuple[SequenceSpec, Parents]
"""A valid sequence, and the parents of its spans."""


class InboxFull(Exception):
    """The engine's thread does not keep up, or has ended."""


class EngineLoop:
    """Drives one engine. `run` is its thread, and `submit`, `wake` and `stop` may be called from any other.

    Without a thread, `begin` is called once, and `turn` whenever ``changed`` was notified. `serve`, `admit`, `cancel`,
    `abandon` and `demand` are what commands call.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        telemetry: SequenceTelemetry,
        watchdog: Watchdog,
        clock: Callable[[], float],
        changed: Changes,
        *,
        isolates: bool,
    ) -> None:
        self._engine = engine
        self._isolates = isolates
        self._alone = ""
        """The sequence that is computed alone."""
        self._begins_at = -math.inf
        """No step before."""
        self._sender = sender
        self._telemetry = telemetry
        self._watchdog = watchdog
        self._clock = clock
        self._grants = Grants()
        self._batches = RunningBatches()
        self._inbox: deque[Command] = deque()
        self._admissions: defaultdict[str, list[worker_pb2.Admission]] = defaultdict(list)
        """What came of batches since the last report, by batcher."""
        self._changed = changed
        self._stopping = False
        self._faults = 0
        self._last_load = worker_pb2.WorkerLoad()

    def submit(self, command: Command) -> None:
        """Queues a command, to be executed between two steps.

        Raises:
            InboxFull: it was not taken.
        """
        with self._changed:
            if self._stopping or len(self._inbox) >= INBOX_MAX:
                raise InboxFull("the worker is overloaded or closing")
            self._inbox.append(command)
            self._changed.notify()

    def wake(self) -> None:
        """The engine has something to do that no command told."""
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """Lets `run` return after the step it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Execute commands and steps until `stop`."""
        self.begin()
        while (commands := self._next_commands()) is not None:
            self._execute(commands)
        self.end()

    def begin(self) -> None:
        """Report the load of the engine before its first command."""
        self._last_load = self._engine.load()
        self._sender.post({}, self._last_load)

    def turn(self) -> None:
        """Execute the commands that wait, and compute a step if one is due."""
        commands, self._inbox = self._inbox, deque()
        self._execute(commands)

    def end(self) -> None:
        """Make the spans that are left."""
        self._telemetry.flush(math.inf)

    def _execute(self, commands: Sequence[Command]) -> None:
        if commands:
            self._last_load = self._execute_all(commands)
        if self.is_due and self._sender.has_room():
            self._last_load = self._step(self._last_load)
        self._telemetry.flush(self._clock())

    @property
    def has_commands(self) -> bool:
        """Whether commands wait for the next turn."""
        return bool(self._inbox)

    @property
    def holds(self) -> bool:
        """Whether a turn is due after `HOLD_S`."""
        return self._telemetry.holds

    def _next_commands(self) -> Sequence[Command] | None:
        """Takes the commands of the inbox; sleeps while there are neither commands nor sequences. None after `stop`."""
        until_begin_s = self._begins_at - self._clock()
        held_s = HOLD_S if self._telemetry.holds else None
        left_s = until_begin_s if until_begin_s > 0 else held_s
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._inbox or self.is_due, left_s)
            commands, self._inbox = self._inbox, deque()
            return None if self._stopping else commands

    @property
    def is_due(self) -> bool:
        """Whether there is a step to compute now."""
        return self._engine.has_sequences() and self._clock() >= self._begins_at

    def _execute_all(self, commands: Sequence[Command]) -> worker_pb2.WorkerLoad:
        self._watchdog.begin(0, self._clock())
        for command in commands:
            command()
        load = self._load()
        self._sender.post({}, load, self._admissions, self._grants.give(load, self._clock()))
        self._admissions.clear()
        self._watchdog.end(self._clock(), is_step=False)
        return load

    def _load(self) -> worker_pb2.WorkerLoad:
        """Return the load of the engine, with the batches that it holds sequences of."""
        load = self._engine.load()
        load.batches = len(self._batches)
        return load

    def serve(self, channel: worker_pb2.OpenChannel) -> None:
        """A batcher has opened a channel: the sequences of the one before are cancelled, then it is ready."""
        batcher, epoch = channel.batcher, channel.epoch
        if self._sender.has_channel(batcher, epoch):
            self._engine.cancel(
                [sequence.request_id for sequence in self._telemetry.owned(batcher)]
            )
            self._grants.open(batcher, epoch, channel.heartbeat_ms / 1000)
            self._sender.make_ready(batcher, epoch)

    def cancel(self, batcher: str, attempts: Mapping[str, int]) -> None:
        """Stops sequences of a batcher; ``attempts``: by request, the highest to stop."""
        sequences = self._telemetry.owned(batcher)
        self._engine.cancel(
            [
                sequence.request_id
                for sequence in sequences
                if sequence.attempt <= attempts.get(sequence.request_id, -1)
            ]
        )

    def abandon(self, batcher: str, at: float) -> None:
        """The batcher's channel is gone: the sequences that it sent before ``at`` (monotonic seconds) are cancelled.

        The batcher may have opened a new channel, and sent sequences over it, before this is called.
        """
        sequences = self._telemetry.owned(batcher, at)
        self._telemetry.abandon(sequences)
        self._telemetry.lost(batcher)
        self._engine.cancel([sequence.request_id for sequence in sequences])
        if not self._sender.has_channel(batcher, self._grants.epoch(batcher)):
            self._grants.close(batcher)

    def demand(self, batcher: str, epoch: int, waiting: Sequence[int]) -> None:
        """So many sequences of each class wait at a batcher."""
        if epoch == self._grants.epoch(batcher):
            self._grants.wait(batcher, waiting, self._clock())

    def admit(
        self,
        batch: worker_pb2.Batch,
        sequences: Sequence[Admitted],
        refused: Sequence[worker_pb2.Refusal],
        arrived_at: float,
    ) -> None:
        """Takes the valid sequences of a batch; ``refused`` were invalid."""
        if not self._sender.has_channel(batch.batcher, batch.epoch):
            return
        admission = worker_pb2.Admission(batch_id=batch.batch_id, refused=refused)
        self._grants.take(batch, arrived_at)
        for spec, parents in sequences:
            try:
                self._add(spec, arrived_at)
            except Refused as error:
                admission.refused.append(messages.refusal(spec.request_id, error))
            else:
                self._batches.enter(spec.request_id, batch.batch_id)
                self._entered(spec, parents, arrived_at)
        self._admissions[batch.batcher].append(admission)

    def _entered(self, spec: SequenceSpec, parents: Parents, arrived_at: float) -> None:
        self._grants.entered(spec.owner)
        replaced = self._telemetry.accept(spec, parents, arrived_at)
        if replaced is None:
            return
        self._grants.left(replaced.spec.owner)
        if replaced.spec.owner != spec.owner:
            # Its batcher would wait for frames, and count it among the sequences here.
            end = replaced.cancelled()
            posted = [(end, messages.final(end))]
            self._sender.post({replaced.spec.owner: posted}, self._load())

    def _add(self, spec: SequenceSpec, arrived_at: float) -> None:
        if self._alone:
            raise EngineFull("a sequence is computed alone")
        if spec.last_try and self._isolates:
            self._isolate(spec)
        try:
            self._engine.add(spec, arrived_at)
        except Refused:
            self._left_alone(spec.request_id)
            raise

    def _isolate(self, spec: SequenceSpec) -> None:
        """Returns all sequences, so that the next one is computed alone."""
        self._alone = spec.request_id
        self._grants.withdrawn = True
        now = self._clock()
        self._begins_at = now + ALONE_S
        sequences = self._engine.abort("another sequence is computed alone")
        self._report(sequences, now, frame_pb2.RETURN_CAUSE_NOT_ACCEPTED)

    def _left_alone(self, request_id: str) -> None:
        """If it is the sequence that is computed alone: others may come."""
        if request_id == self._alone:
            self._alone, self._grants.withdrawn = "", False

    def _step(self, load: worker_pb2.WorkerLoad) -> worker_pb2.WorkerLoad:
        """Computes one step; ``load`` is that before it. Returns the one after it."""
        began_at = self._clock()
        self._watchdog.begin(load.running + load.waiting + load.waiting_tokens, began_at)
        try:
            steps = self._engine.step(began_at)
            self._faults = 0
        except Exception as error:
            self._faults += 1
            if self._faults == FAULTS_MAX:
                raise
            # A fault of one step must not end the worker: its sequences go elsewhere, later ones may succeed.
            log.exception("a step failed; all sequences are returned")
            steps = self._engine.abort(f"the engine failed: {type(error).__name__}")
        now = self._clock()
        self._watchdog.end(now, is_step=True)
        self._telemetry.counts.add_step(now - began_at)
        return self._report(steps, now)

    def _report(
        self,
        steps: Sequence[SequenceStep],
        now: float,
        cause: "frame_pb2.ReturnCause.ValueType" = frame_pb2.RETURN_CAUSE_UNSPECIFIED,
    ) -> worker_pb2.WorkerLoad:
        """Sends what became of sequences; ``cause``: why they are returned."""
        by_batcher: defaultdict[str, list[Posted]] = defaultdict(list)
        for step in steps:
            timings, final = self._telemetry.add_step(step, now), None
            if step.end is not None:
                final = messages.final(step, timings)
                final.return_cause = cause
                self._grants.left(step.owner)
                self._batches.leave(step.request_id)
            by_batcher[step.owner].append((step, final))
            self._left_alone(step.request_id)
        load = self._load()
        self._sender.post(by_batcher, load, grants=self._grants.give(load, now))
        return load


class Worker:
    """Serves the requests of batchers. ``worker_id`` is new with every start.

    ``on_fault`` is called after an unexpected exception was logged that ends the work, and when the engine hangs.
    """

    def __init__(
        self,
        model: str,
        engine: Engine,
        tracer: Tracer,
        on_fault: Callable[[], None],
        runner: Runner | None = None,
        *,
        isolates: bool = True,
    ) -> None:
        """Make a worker that does not work yet.

        Args:
            runner: what runs engine and sender; two threads if None.
            isolates: sequences are computed in this process, so one may end the others with it.
        """
        self.worker_id = f"{model}-{uuid.uuid4().hex[:8]}"
        runs = self._runner = runner or Threads(gives_way=isolates)
        clock, watchdog = time.monotonic, Watchdog()
        telemetry = SequenceTelemetry(tracer, model, self.worker_id)
        channels = Channels(self.worker_id, telemetry.counts.message)
        self._sender = Sender(
            channels, watchdog, clock, self._lost, on_fault, runs.changes_of_sender
        )
        changed = runs.changes_of_engine
        self._loop = EngineLoop(
            engine, self._sender, telemetry, watchdog, clock, changed, isolates=isolates
        )
        self._on_fault = on_fault

    def start(self) -> None:
        """Begin to work."""
        self._runner.start(self._loop, self._sender, self._on_fault)

    def stop(self) -> None:
        """End the engine after its step, then the channels."""
        self._runner.stop(self._loop, self._sender)

    def wake(self) -> None:
        """Notice that `Engine.has_sequences` may have become true; from any thread that the runner allows."""
        self._loop.wake()

    def handle(
        self, request: worker_pb2.WorkerRequest, responses: ResponseSender, traceparent: str = ""
    ) -> None:
        """Queues ``request``. The responses of a channel go to ``responses``; others end without one.

        Never waits for the engine: a step may take long. Sequences without a traceparent of their own take ``traceparent``.

        Raises:
            MalformedMessage: the request is incomplete; nothing was sent to ``responses``.
            InboxFull: it was not taken; nothing was sent to ``responses``.
        """
        loop = self._loop
        match request.WhichOneof("message"):
            case "open_channel":
                self._open(request.open_channel, responses)
                return
            case "batch":
                loop.submit(partial(loop.admit, *_checked(request.batch, traceparent)))
                self._sender.expect(request.batch.batcher, request.batch.epoch)
            case "cancel_tasks":
                attempts = {
                    sequence.request_id: sequence.attempt for sequence in request.cancel_tasks.tasks
                }
                loop.submit(partial(loop.cancel, request.cancel_tasks.batcher, attempts))
            case "demand":
                demand = request.demand
                waiting = tuple(demand.queued)
                loop.submit(partial(loop.demand, demand.batcher, demand.epoch, waiting))
            case _:
                raise MalformedMessage("not a WorkerRequest: no message is set")
        self._sender.end(responses)

    def _open(self, channel: worker_pb2.OpenChannel, responses: ResponseSender) -> None:
        if not channel.batcher or not channel.heartbeat_ms:
            raise MalformedMessage("OpenChannel needs batcher and heartbeat_ms")
        if not channel.renews:
            log.info("batcher %s opens a channel", channel.batcher)
        self._sender.open(channel, responses)
        if not channel.renews:
            self._loop.submit(partial(self._loop.serve, channel))

    def _lost(self, batcher: str, at: float) -> None:
        try:
            self._loop.submit(partial(self._loop.abandon, batcher, at))
        except InboxFull:
            log.warning("the inbox is full: the sequences of a lost batcher are not cancelled")


def _checked(
    batch: worker_pb2.Batch, traceparent: str
) -> tuple[worker_pb2.Batch, list[Admitted], list[worker_pb2.Refusal], float]:
    """A batch that has arrived now, its valid sequences, and why others are refused: what `EngineLoop.admit` takes."""
    if not batch.batcher or not batch.tasks:
        raise MalformedMessage("Batch needs batcher and tasks")
    now = time.monotonic()
    sequences: list[Admitted] = []
    refused: list[worker_pb2.Refusal] = []
    for sequence in batch.tasks:
        try:
            parents = Parents(sequence.traceparent or traceparent, sequence.origin)
            spec = sequence_spec(sequence, batch.batcher, now, batch.batch_id, parents.batch)
            sequences.append((spec, parents))
        except Refused as refusal:
            refused.append(messages.refusal(sequence.task.request_id, refusal))
    return batch, sequences, refused, now
