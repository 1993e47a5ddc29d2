"""The workers of a model: their reports, the rows sent to them, what they grant, and which of them get rows."""

import math
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

from batcher.core.row import Row
from batcher.core.scheduler.capacity import Capacity, Room
from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import RANKS

FAILURES_MAX: Final = 2
"""Failures in succession after which a worker is tried with single rows."""
BREAK_S: Final = 0.5
BREAK_S_MAX: Final = 10.0
"""The pause before the first try, and the longest; seconds."""
_NOTHING: Final = (0,) * len(RANKS)
_ENDLESS: Final = (math.inf,) * len(RANKS)


class Breaker:
    """Keeps rows from a worker that fails again and again: one that fails fast looks idle.

    Attributes:
        open_until: no row is sent before; 0: nothing is known against the worker.
    """

    def __init__(self) -> None:
        self.open_until = 0.0
        self._failures = 0

    def failed(self, now: float) -> None:
        """The worker returned rows, or was lost with some."""
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            pause_s = min(BREAK_S * 2 ** (self._failures - FAILURES_MAX), BREAK_S_MAX)
            self.open_until = now + pause_s

    def succeeded(self) -> None:
        """A row got a token."""
        self.open_until, self._failures = 0.0, 0

    def rows_max(self, now: float) -> float:
        """Rows that may be in the worker: after a pause one, to try."""
        if not self.open_until:
            return math.inf
        return 1 if self.open_until <= now else 0


class ChannelBroken(Exception):
    """Responses are missing, or come from another process: rows of this channel must be sent again."""


class WorkerState:
    """One worker from the opening of its channel to its loss: its last report, and the rows sent since.

    Attributes:
        worker_id: as the worker reports it; empty: no report yet.
        live: whether the engine serves the channel: batches may be sent.
        load: as reported last.
        counts: what it has counted since it started; None: not reported yet.
        refuses: it refused a row for lack of room: nothing is sent until its next report.
        rows: in the worker, or in flight to it, by request.
        told: rows that wait for it, by class, as it heard last; empty: it is told again, as after each heartbeat
            while rows wait: it gives the room of a batcher that is silent to others.
    """

    def __init__(self) -> None:
        self.worker_id = ""
        self.live = self.refuses = False
        self.load = worker_pb2.WorkerLoad()
        self.counts: worker_pb2.WorkerCounts | None = None
        self.rows: dict[str, Row] = {}
        self.told: Sequence[int] = _NOTHING
        self._report = worker_pb2.StepReport()
        self._next_sequence = 0
        self._sent_rows = self._sent_tokens = 0
        self._unanswered: dict[str, Sequence[Row]] = {}
        """Batches that the worker's reports do not count yet."""

    @property
    def serves(self) -> bool:
        """Whether it can compute rows: it is live, and so is the server that computes for it, if there is one."""
        return self.live and not self.load.server_unreachable

    # Messages from the worker.

    def take(self, report: worker_pb2.StepReport) -> None:
        """Takes a response of the channel.

        Raises:
            ChannelBroken: an earlier one is missing, or the worker has restarted.
        """
        if report.sequence != self._next_sequence:
            raise ChannelBroken(f"response {report.sequence} instead of {self._next_sequence}")
        if report.worker != self.worker_id:
            if self.worker_id:
                raise ChannelBroken(f"worker {report.worker} instead of {self.worker_id}")
            self.worker_id = report.worker
        self._next_sequence += 1
        self._report, self.load = report, report.load
        self.live, self.refuses = report.ready, False
        if report.HasField("counts"):
            self.counts = report.counts
            if any(self.told):
                self.told = ()

    def admitted(self, batch_id: str) -> Sequence[Row]:
        """Its engine has taken a batch; returns the rows of it."""
        return self._unanswered.pop(batch_id, ())

    # Rows sent to it.

    def sent(self, batch_id: str, rows: Sequence[Row]) -> None:
        """A batch was sent."""
        self._unanswered[batch_id] = rows
        self._sent_rows += len(rows)
        for row in rows:
            self._sent_tokens += row.cache_tokens
            self.rows[row.request_id] = row

    # Room.

    @property
    def has_room(self) -> bool:
        """Whether the worker grants rows of every class that were not sent."""
        return self._granted()[0][-1] > self._sent_rows

    def capacity(self, name: str, rows_max: float = math.inf) -> Capacity:
        """What may be sent to the worker now; ``name`` is the worker's.

        Args:
            rows_max: rows of this batcher that may be in it.
        """
        load, left = self.load, rows_max - len(self.rows)
        prefill = sum([row.prefill_tokens for rows in self._unanswered.values() for row in rows])
        # Most often none wait: each message that is looked into takes a microsecond.
        waits = (load.waiting_tokens and [each.waiting_tokens for each in load.classes]) or _NOTHING
        waiting, rooms = prefill, list[Room]()
        for task_grants, token_grants, more in zip(*self._granted(), waits, strict=False):
            waiting += more
            free_rows = min(task_grants - self._sent_rows, left)
            rooms.append(Room(free_rows, token_grants - self._sent_tokens, waiting))
        return Capacity(
            worker=name,
            free_rows=rooms[-1].free_rows,
            free_tokens=rooms[-1].free_tokens,
            waiting_tokens=load.waiting_tokens + prefill,
            running_rows=load.running + load.waiting,
            batches_in_flight=len(self._unanswered),
            batches_running=load.batches + len(self._unanswered),
            urgent=rooms[:-1] if load.classes else (),
        )

    def _granted(self) -> tuple[Sequence[int], Sequence[float]]:
        """Rows and cache tokens that may have been sent in all, by class."""
        rows, tokens = self._report.task_grants, self._report.token_grants
        # A grant that does not tell the classes apart is none.
        granted = len(rows) == len(RANKS) and not self.refuses
        return rows if granted else _NOTHING, tokens if len(tokens) == len(RANKS) else _ENDLESS


def without_standby(live: Collection[str], ranked: Sequence[str], standby: int) -> list[str]:
    """The workers that get rows, of those that are ``live``.

    The last ``standby`` ones of ``ranked``, all workers of the model, only replace others that are lost. All batchers
    rank alike, so they leave the same ones out.
    """
    return [worker for worker in ranked if worker in live][: len(ranked) - standby]


class Workers:
    """All workers of a model, by name, and which of them get rows.

    Attributes:
        drained: workers that get no new rows.
    """

    def __init__(self, ranked: Sequence[str] = (), standby: int = 0) -> None:
        """``ranked``: all workers, those in front first; only needed with ``standby``, see `without_standby`."""
        self._ranked, self._standby = ranked, standby
        self._states: dict[str, WorkerState] = {}
        self._breakers: dict[str, Breaker] = {}
        self.drained: frozenset[str] = frozenset()

    def of(self, worker: str) -> WorkerState:
        """The state of a worker since its channel was opened."""
        state = self._states.get(worker)
        if state is None:
            state = self._states[worker] = WorkerState()
        return state

    def known(self) -> dict[str, WorkerState]:
        """All workers with a channel."""
        return dict(self._states)

    def lost(self, worker: str) -> WorkerState | None:
        """The worker is lost; returns its state."""
        return self._states.pop(worker, None)

    def landed(self, row: Row) -> WorkerState | None:
        """The row has left its worker, which is returned unless it is lost."""
        worker = self._states.get(row.worker)
        if worker is not None:
            worker.rows.pop(row.request_id, None)
        return worker

    def tried(self, worker: str, now: float, *, succeeded: bool, failed: bool) -> None:
        """Rows of the worker got tokens, or were lost or given back."""
        breaker = self._breakers.get(worker)
        if breaker is None:
            if not failed:
                return
            breaker = self._breakers[worker] = Breaker()
        if succeeded:
            breaker.succeeded()
        if failed:
            breaker.failed(now)

    # Which of them get rows.

    def active(self) -> dict[str, WorkerState]:
        """Workers that batches may be sent to."""
        live = {
            name: state
            for name, state in self._states.items()
            if state.live and name not in self.drained
        }
        # Rows that wait while no server answers go to a worker, which fails them at once.
        live = {name: state for name, state in live.items() if state.serves} or live
        if not self._standby:
            return live
        # One that fails is replaced too, and tried again beside the standby.
        failing = {
            name for name in live if name in self._breakers and self._breakers[name].open_until
        }
        chosen = without_standby(live.keys() - failing, self._ranked, self._standby)
        return {name: live[name] for name in live if name in failing or name in chosen}

    def capacities(self, active: Mapping[str, WorkerState], now: float) -> list[Capacity]:
        """What fits in each of them."""
        return [state.capacity(name, self._rows_max(name, now)) for name, state in active.items()]

    def _rows_max(self, name: str, now: float) -> float:
        breaker = self._breakers.get(name)
        return breaker.rows_max(now) if breaker else math.inf

    def probe_at(self, now: float) -> float:
        """When the next worker that failed is tried again."""
        pauses = [breaker.open_until for breaker in self._breakers.values()]
        return min([until for until in pauses if until > now], default=math.inf)

    def tell(
        self, waiting: Sequence[int], active: Container[str], formed: Container[str], now: float
    ) -> list[tuple[str, Sequence[int]]]:
        """Which workers are to hear that rows of a class begin or cease to wait; those ``formed`` hear it so.

        None waits for one that gets no more rows for now.
        """
        demands: list[tuple[str, Sequence[int]]] = []
        for name, state in self._states.items():
            if name in formed:
                state.told = waiting
            asks = any(waiting) and name in active
            told = waiting if asks and self._rows_max(name, now) > len(state.rows) else _NOTHING
            if state.live and list(map(bool, told)) != list(map(bool, state.told)):
                state.told = told
                demands.append((name, told))
        return demands
