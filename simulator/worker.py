"""One worker in the simulation: batches on their way, the steps of its engine, and what the batcher knows of it."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from batcher.core.replicas import Replica
from batcher.core.rooms import Room, Use, rooms
from simulator.cost import StepCost
from simulator.engine import Engine, EngineLoad, EngineRow, Progress, Stretch
from simulator.events import Events


class WorkerEvents(Protocol):
    """Who hears of a worker."""

    def on_admitted(self, worker: "SimulatedWorker", refused: Sequence[str]) -> None:
        """The worker's answer to a batch has arrived."""

    def on_progress(self, worker: "SimulatedWorker", progress: Progress) -> None:
        """Steps are done now; their frames are on their way."""


class SimulatedWorker:
    """An engine and the time its steps take.

    Attributes:
        busy_s: that it computed.
        row_s: seconds times rows in slots.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        cost: StepCost,
        send_s: float,
        events: Events,
        listener: WorkerEvents,
    ) -> None:
        self.name = name
        self.busy_s = 0.0
        self.row_s = 0.0
        self._engine = engine
        self._cost = cost
        self._send_s = send_s
        self._events = events
        self._listener = listener
        self._stretch: Stretch | None = None
        self._started_at = 0.0
        self._turn = 0
        self._leaving: list[str] = []
        self._arrived: list[Sequence[EngineRow]] = []
        self._sent: dict[str, int] = {}
        """Rows that the batcher believes to be here, with the tokens they may need of the cache."""
        self._travelling: dict[str, EngineRow] = {}
        self._unanswered = 0

    def replica(self) -> Replica:
        """What the batcher knows: the worker's last report, and what it sent since."""
        load = self._engine.load()
        travelling = self._travelling.values()
        free = math.inf
        if load.cache_tokens:
            coming = sum(self._sent[row.request_id] for row in travelling)
            # Rows that wait inside the worker have no place in its cache yet.
            free = load.free_tokens - load.waiting_tokens - coming
        present = max(len(self._sent), load.running + load.waiting + len(self._travelling))
        return Replica(
            worker=self.name,
            free_rows=max(0, load.slots - present),
            free_tokens=max(0.0, free),
            waiting_tokens=load.waiting_tokens + sum(row.length for row in travelling),
            running_rows=load.running + load.waiting,
            batches_in_flight=self._unanswered,
            step_s=self._cost(0, load.running, load.running_tokens) if load.running else 0.0,
            prefill_token_s=self._cost.prefill_token_s,
            rooms=self._rooms(load, free),
        )

    def _rooms(self, load: EngineLoad, free_tokens: float) -> tuple[Room, ...]:
        uses = list(self._engine.uses())
        if not uses:
            return ()
        for row in self._travelling.values():
            rows, waiting, cached = uses[row.rank]
            promised = self._sent.get(row.request_id, 0)
            uses[row.rank] = Use(rows + 1, waiting + row.length, cached + promised)
        return rooms(uses, load.slots, load.places, free_tokens)

    @property
    def running(self) -> int:
        """Rows in slots."""
        return self._engine.load().running

    def send(self, rows: Sequence[EngineRow], cache_tokens: Sequence[int]) -> None:
        """A batch leaves for the worker."""
        self._unanswered += 1
        self._travelling.update((row.request_id, row) for row in rows)
        self._sent.update(
            (row.request_id, tokens) for row, tokens in zip(rows, cache_tokens, strict=True)
        )
        self._later(lambda: self._receive(rows))

    def drop(self, request_id: str) -> None:
        """The row shall leave behind the step that is running."""
        self._leaving.append(request_id)
        self._cut_short()

    def forget(self, request_id: str) -> None:
        """The batcher has heard that the row is here no more."""
        self._sent.pop(request_id, None)

    def account(self) -> None:
        """Books the time of the steps that are still running when the simulation ends."""
        if self._stretch is not None:
            self._book(self._events.now - self._started_at)

    def _later(self, act: Callable[[], None]) -> None:
        self._events.at(self._events.now + self._send_s, act)

    def _receive(self, rows: Sequence[EngineRow]) -> None:
        """The engine looks at what came between two steps."""
        self._arrived.append(rows)
        self._cut_short()
        if self._stretch is None:
            self._start()

    def _admit(self, rows: Sequence[EngineRow]) -> None:
        for row in rows:
            del self._travelling[row.request_id]
        refused = self._engine.admit(rows)
        self._later(lambda: self._answer(refused))

    def _answer(self, refused: Sequence[str]) -> None:
        self._unanswered -= 1
        for request_id in refused:
            self.forget(request_id)
        self._listener.on_admitted(self, refused)

    def _start(self) -> None:
        for request_id in self._leaving:
            self._engine.cancel(request_id)
        self._leaving.clear()
        for rows in self._arrived:
            self._admit(rows)
        self._arrived.clear()
        self._stretch, self._started_at = self._engine.stretch(), self._events.now
        if self._stretch is not None:
            self._finish_behind(self._stretch.steps)

    def _cut_short(self) -> None:
        """Ends the stretch behind the step that is running: something waits to join or to leave."""
        if self._stretch is None:
            return
        steps = self._stretch.steps_within(self._events.now - self._started_at)
        self._finish_behind(steps)

    def _finish_behind(self, steps: int) -> None:
        assert self._stretch is not None
        self._turn += 1
        turn, end = self._turn, self._started_at + self._stretch.seconds(steps)
        self._events.at(end, lambda: self._finish(turn, steps))

    def _finish(self, turn: int, steps: int) -> None:
        if turn != self._turn:
            return
        self._book(self._events.now - self._started_at)
        progress = self._engine.advance(steps)
        self._stretch = None
        self._listener.on_progress(self, progress)
        self._start()

    def _book(self, seconds: float) -> None:
        self.busy_s += seconds
        self.row_s += seconds * self._engine.load().running
