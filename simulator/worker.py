"""A simulated worker: the batches in flight to it, the steps of its engine, and the batcher's view of it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from batcher.core.scheduler.capacity import Capacity, Room
from model_workers.grants import NO_CAPACITY, ClassCapacity, class_capacities
from model_workers.running_batches import RunningBatches
from simulator.cores import Action, Cores, EventQueue
from simulator.cost import StepCost
from simulator.engines import Engine, EngineRow, Progress, Stretch


class SimulatedWorker:
    """An engine and the time its steps take.

    Attributes:
        busy_s: seconds in which it computed.
        row_s: seconds times rows in slots.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        cost: StepCost,
        send_s: float,
        events: EventQueue,
        cores: Cores | None,
        on_admitted: Callable[[Sequence[str]], None],
        on_progress: "Callable[[SimulatedWorker, Progress], None]",
    ) -> None:
        """``cores``: which the engine shares; None: it has its own.

        ``on_admitted``: the answer to a batch has arrived, with the rows that are refused.
        ``on_progress``: steps are done; their frames have been sent.
        """
        self.name = name
        self.busy_s = 0.0
        self.row_s = 0.0
        self._engine = engine
        self._cost = cost
        self._send_s = send_s
        self._events = events
        self._cores = cores
        self._on_admitted, self._on_progress = on_admitted, on_progress
        self._stretch: Stretch | None = None
        self._started_at = 0.0
        self._version = 0
        """The version of the planned end of the stretch; an end of an earlier version is void."""
        self._leaving: list[str] = []
        self._arrived: list[Sequence[EngineRow]] = []
        self._sent: dict[str, int] = {}
        """Rows that the batcher counts as here, with the tokens of cache that it reserved for each."""
        self._in_flight: dict[str, EngineRow] = {}
        self._unanswered = 0
        self._batches = RunningBatches()
        self._sent_batches = 0
        self._unsent: list[Progress] = []
        self._sends = False
        """Whether a report is on its way over the shared cores."""

    def capacity(self) -> Capacity:
        """What the batcher knows: the worker's last report, and what it sent since."""
        load = self._engine.load()
        in_flight = self._in_flight.values()
        reserved = sum(self._sent.get(row.request_id, 0) for row in in_flight)
        # Rows that have left, of which the batcher does not know yet, are in no report either.
        late = max(0, len(self._sent) - load.running - load.waiting - len(in_flight))
        prefill = sum(row.prompt for row in in_flight)

        def left(capacity: ClassCapacity, waiting_tokens: int) -> Room:
            rows = max(0, capacity.tasks - len(in_flight) - late)
            return Room(rows, capacity.tokens - reserved, waiting_tokens + prefill)

        *urgent, last = NO_CAPACITY if load.batch_running else class_capacities(load)
        waiting = accumulate(rank.waiting_tokens for rank in load.classes)
        return Capacity(
            self.name,
            *left(last, load.waiting_tokens),
            running_rows=load.running + load.waiting,
            batches_in_flight=self._unanswered,
            batches_running=len(self._batches),
            urgent=list(map(left, urgent, waiting)),
        )

    def send(self, rows: Sequence[EngineRow], cache_tokens: Sequence[int]) -> None:
        """A batch leaves for the worker."""
        self._unanswered += 1
        self._sent_batches += 1
        for row in rows:
            self._batches.enter(row.request_id, f"{self._sent_batches}")
        self._in_flight.update((row.request_id, row) for row in rows)
        self._sent.update(
            (row.request_id, tokens) for row, tokens in zip(rows, cache_tokens, strict=True)
        )
        self._later(lambda: self._receive(rows))

    def drop(self, request_id: str) -> None:
        """The row leaves after the step that is running."""
        self._leaving.append(request_id)
        self._cut_short()

    def forget(self, request_id: str) -> None:
        """The batcher knows that the row is no longer here."""
        self._sent.pop(request_id, None)
        self._batches.leave(request_id)

    def account(self) -> None:
        """Counts the time of the steps that are still running when the simulation ends."""
        if self._stretch is not None:
            self._count_time(self._events.now - self._started_at)

    def _later(self, action: Action) -> None:
        self._events.at(self._events.now + self._send_s, action)

    def _receive(self, rows: Sequence[EngineRow]) -> None:
        """The engine takes new rows between two steps."""
        self._arrived.append(rows)
        self._cut_short()
        if self._stretch is None:
            self._start()

    def _admit(self, rows: Sequence[EngineRow]) -> None:
        for row in rows:
            del self._in_flight[row.request_id]
        refused = self._engine.admit(rows)
        self._later(lambda: self._answer(refused))

    def _answer(self, refused: Sequence[str]) -> None:
        self._unanswered -= 1
        for request_id in refused:
            self.forget(request_id)
        self._on_admitted(refused)

    def _start(self) -> None:
        for request_id in self._leaving:
            self._engine.cancel(request_id)
        self._leaving.clear()
        for rows in self._arrived:
            self._admit(rows)
        self._arrived.clear()
        self._started_at = self._events.now
        self._stretch = self._engine.stretch(self._started_at)
        if self._stretch is not None and self._cores is not None:
            self._share(self._cores)
        elif self._stretch is not None:
            self._finish_after(self._stretch.steps)

    def _cut_short(self) -> None:
        """Ends the stretch after the step that is running: a row waits to join or to leave."""
        if self._stretch is None or self._cores is not None:
            return
        steps = self._stretch.steps_within(self._events.now - self._started_at)
        self._finish_after(steps)

    def _finish_after(self, steps: int) -> None:
        assert self._stretch is not None
        self._version += 1
        version, end = self._version, self._started_at + self._stretch.seconds(steps)
        self._events.at(end, lambda: self._finish(version, steps))

    def _share(self, cores: Cores) -> None:
        """One step, on the shared cores."""
        assert self._stretch is not None
        seconds, share = self._stretch.seconds(1), cores.sharing.step_share
        computed = partial(cores.work, share * seconds, lambda: self._finish(self._version, 1))
        self._events.at(self._started_at + (1 - share) * seconds, computed)

    def _finish(self, version: int, steps: int) -> None:
        if version != self._version:
            return
        self._count_time(self._events.now - self._started_at)
        progress = self._engine.advance(steps)
        self._stretch = None
        if self._cores is None:
            self._on_progress(self, progress)
        elif progress.first or progress.ended or progress.streamed:
            self._unsent.append(progress)
            self._send_report(self._cores)
        self._start()

    def _send_report(self, cores: Cores) -> None:
        """The frames of all steps that are done, once the last report has arrived."""
        if self._unsent and not self._sends:
            self._sends = True
            sent, self._unsent = self._unsent, []
            streamed = sum(progress.streamed for progress in sent)
            seconds = cores.sharing.report_s + cores.sharing.token_s * streamed
            cores.work(seconds, lambda: self._arrived_at_callers(sent, cores))

    def _arrived_at_callers(self, sent: Sequence[Progress], cores: Cores) -> None:
        self._sends = False
        for progress in sent:
            self._on_progress(self, progress)
        self._send_report(cores)

    def _count_time(self, seconds: float) -> None:
        self.busy_s += seconds
        self.row_s += seconds * self._engine.load().running
