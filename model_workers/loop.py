"""The engine's thread: obey commands, step while there are rows, sleep otherwise."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Final

from model_workers import frames
from model_workers.channel import Port
from model_workers.engine.protocol import (
    Engine,
    Refused,
    RowSpec,
    RowStep,
    WorkerAway,
)
from model_workers.ledger import Ledger
from model_workers.sender import Sender
from sluice.internal.v1 import frame_pb2, worker_pb2

log = logging.getLogger(__name__)

INBOX_MAX: Final = 1024
"""Commands that may wait for the engine's thread."""


@dataclass(frozen=True)
class Admit:
    """Rows (with their traceparents) to take; ``refused`` at the door already. Answered on ``port``."""

    rows: tuple[tuple[RowSpec, str], ...]
    refused: tuple[worker_pb2.Refusal, ...]
    port: Port
    arrived_at: float


@dataclass(frozen=True)
class Cancel:
    """Rows of ``batcher`` to stop; answered on ``port``."""

    batcher: str
    request_ids: tuple[str, ...]
    port: Port


@dataclass(frozen=True)
class Abandon:
    """The batcher's channel is gone: nobody waits for the rows it sent before ``at``, monotonic seconds.

    The batcher may have opened a new channel, and sent rows over it, before this is obeyed.
    """

    batcher: str
    at: float


Command = Admit | Cancel | Abandon


class InboxFull(Exception):
    """The engine's thread does not keep up, or has ended."""


class EngineLoop:
    """Drives one engine. `submit` and `stop` may be called from any thread, `run` is the thread."""

    def __init__(
        self, engine: Engine, sender: Sender, ledger: Ledger, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._ledger = ledger
        self._clock = clock
        self._inbox: deque[Command] = deque()
        self._changed = Condition()
        self._stopping = False

    def submit(self, command: Command) -> None:
        """Leaves a command for the time between two steps.

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
        """Obeys and steps until `stop`."""
        self._sender.post({}, self._engine.load())
        while self._obey():
            if self._engine.has_rows() and self._sender.has_room():
                self._step()

    def _obey(self) -> bool:
        """Does what waits in the inbox; without rows it sleeps until something does. False after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._inbox or self._engine.has_rows())
            commands, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for command in commands:
            self._do(command)
        return not stopping

    def _do(self, command: Command) -> None:
        match command:
            case Admit():
                self._admit(command)
            case Cancel():
                mine = set(self._ledger.owned(command.batcher))
                self._engine.cancel(mine.intersection(command.request_ids))
                self._answer(command.port, worker_pb2.Admission())
            case Abandon():
                self._engine.cancel(self._ledger.owned(command.batcher, command.at))

    def _admit(self, batch: Admit) -> None:
        admission = worker_pb2.Admission(refused=batch.refused)
        for spec, traceparent in batch.rows:
            try:
                self._take(spec, traceparent, batch.arrived_at)
            except Refused as refused:
                admission.refused.append(frames.refusal(spec.request_id, refused))
            else:
                admission.accepted.append(spec.request_id)
        self._answer(batch.port, admission)

    def _take(self, spec: RowSpec, traceparent: str, arrived_at: float) -> None:
        if not self._sender.has_channel(spec.owner):
            raise WorkerAway("this batcher has no open channel to the worker")
        self._engine.add(spec, arrived_at)
        self._ledger.accept(spec, traceparent, arrived_at)

    def _answer(self, port: Port, admission: worker_pb2.Admission) -> None:
        load = self._engine.load()
        admission.load.CopyFrom(load)
        self._sender.post({}, load)
        self._sender.answer(port, worker_pb2.WorkerResponse(admission=admission))

    def _step(self) -> None:
        try:
            steps = self._engine.step(self._clock())
        except Exception as error:
            # A fault of one step must not end the worker: its rows fail, the next ones may do better.
            log.exception("a step failed; all rows end")
            steps = self._engine.abort(f"the engine failed: {type(error).__name__}")
        self._report(steps, self._clock())

    def _report(self, steps: list[RowStep], now: float) -> None:
        by_batcher: defaultdict[str, list[frame_pb2.Frame]] = defaultdict(list)
        for step in steps:
            timings = self._ledger.note(step, now)
            by_batcher[step.owner].append(frames.frame(step, timings))
        self._sender.post(by_batcher, self._engine.load())
