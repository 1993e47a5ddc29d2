"""Which batcher has which row, and what becomes of rows that nobody seems to have (docs/internals/wire.md, Recovery).

The gateway leads: it knows every row that somebody waits for, and the tokens that it has of it.

- A row goes to the batcher with the fewest tasks of those that have room for it, and waits here while none has
  (`gateway.streaming.room`). One that a batcher had before needs no new room, and goes first.
- A row that was silent for ``stall_s`` is asked about, and again after the same time. It is lost when its batcher does
  not know it. When the batcher has said nothing at all since the first of two questions, all its rows are lost.
- NATS says at once when nobody has subscribed for a batcher: then they are too.
- A batcher whose worker is lost returns the rows that it had given to it.
- A lost row is sent again, wherever a batcher is, with the tokens that have arrived and the next attempt, which fences
  the earlier owner out. While no other batcher is there it stays where it was: the batcher may come back.
- A row that was lost `LOSSES_MAX` times in succession without a new token, with its worker or with its batcher, fails
  and becomes a dead letter: it may be the cause. Before that it is tried alone: see `Task.last_try`. What a batcher
  returns because it drains, or has no room, does not count.
- While this gateway is busy, an interactive row is sent with the least time between two frames of it: fewer, larger
  messages cost less in all processes. Readers of rows that were sent before are woken that often, together. First
  tokens and ends do not wait. Interactive rows leave it together too, with `SEND_S` between them where two come in
  that time: at 32 callers three share a batch and a step then, and a one-token request costs all processes a quarter
  less. Where fewer come, waiting would only make their answers late.
- Silence proves nothing while this gateway itself was cut off or stopped: then everything is asked about anew.

Neither clock nor I/O: the owner calls `tick`, and takes what is to be sent with `drain`.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar

from gateway.streaming.room import Line, Room, SentRow, TakenRoom, WaitQueue, line_of
from gateway.streaming.row import Row
from sluice.errors import RETRY_AFTER_S, EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import Cancel, ControlMessage, TaskProgress, TaskQuery
from sluice.wire.subjects import BULK_CLASS, URGENT_CLASS

_T = TypeVar("_T")

LOSSES_MAX: Final = 5
NO_BATCHER_S: Final = 30.0
"""A row that no batcher has taken yet fails when none could for this long, seconds."""
RETRY_S: Final = 0.1
"""How often a row whose batcher may come back is tried with another one, seconds."""
AVOID_S: Final = 1.0
"""A batcher that returned a row gets no other for this long, seconds."""
LAG_S: Final = 0.001
"""A gateway whose event loop comes later than this is busy, seconds: others compute on its cores too."""
BUSY_S: Final = 1.0
"""For so long, seconds."""
SEND_S: Final = 0.01
"""Between two times that a busy gateway sends interactive rows, seconds, where two come in it: with as many as `RECENT`
in `RECENT_S`. The first one does not wait."""
RECENT: Final = 9
RECENT_S: Final = 4 * SEND_S
READ_MS: Final = 1000
UNREAD_S: Final = 0.025
"""A bulk row whose tokens are gathered for more than `READ_MS`, which nobody reads a part of, waits for others so long
before it is sent, seconds: it costs NATS and the batcher less."""
WAITING_FACTOR: Final = 4
"""A row that waits in a batcher is asked about this many times less often than one with tokens."""
QUESTIONS_MAX: Final = 4
"""A row that a batcher did not answer about this often is lost, although the batcher is alive."""
COUNTED_MAX: Final = 1000
"""A batcher of the release before counts attempts on from that of the task, and stays below this."""
MS_MAX: Final = 2**32 - 1
"""Of a time in a task."""
QUERY_ROWS_MAX: Final = 4096
"""Rows in one question, and in one cancel."""
CANCELS_MAX: Final = 16_384
"""Rows that a batcher is told about at a time that nobody waits for."""
ROW_ID_CHARS_MAX: Final = 128
"""A longer id is of no row of any gateway."""
BATCHERS_MAX: Final = 1024
"""Batchers of which it is known when they were heard of; those that were silent for longest are forgotten."""


class Batchers(Protocol):
    """Which batchers there are."""

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        """The one that gets the next row of ``model``; None: there is none but ``without``."""

    def rooms(self, line: Line, now: float) -> Mapping[str, Room]:
        """The room of each that has a worker of the model."""


class Outgoing:
    """Everything that is to be sent, in the order of the fields."""

    questions = False
    """Whether there are questions: the owner must find out whether NATS itself answers, and say so (`restart`)."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, SentRow]] = []
        """Batcher and row."""
        self.control: list[tuple[str, ControlMessage]] = []
        """Batcher and message; empty: to all."""
        self.dead: list[tuple[SentRow, str]] = []
        """Rows that become dead letters, and why."""


class Dispatch:
    """All rows that this gateway waits for.

    Args:
        gateway: this gateway's id.
        stall_s: longest silence of a row, seconds.
        interval_ms: how long tokens of an urgent row that is sent while this gateway is busy are gathered.

    Attributes:
        on_due: called when what there is to send is due.
        on_failed: called with the row and the error when a row cannot be answered.
        on_later: called with what is to be called so many seconds later.
        resent: rows that were lost and sent again, by model, class and what was lost: "worker" or "batcher".
        given_up: rows that became dead letters.
    """

    def __init__(
        self, gateway: str, batchers: Batchers, stall_s: float, interval_ms: int = 0
    ) -> None:
        self.on_due: Callable[[], None] = lambda: None
        self.on_failed: Callable[[str, SluiceError], None] = lambda *_: None
        self.on_later: Callable[[float, Callable[[], None]], object] = lambda *_: None
        self.resent: Counter[tuple[str, str, str]] = Counter()
        self.given_up: Counter[Line] = Counter()
        self._gateway = gateway
        self._batchers = batchers
        self._stall_s = stall_s
        self._interval_ms = interval_ms
        self._busy_until = self._send_at = -math.inf
        self._recent = deque([-math.inf], RECENT)
        """When the last interactive rows were sent while this gateway was busy."""
        self._wakes: dict[Callable[[], None], None] = {}
        """What wakes the readers that wait, each once."""
        self._rows: dict[str, SentRow] = {}
        self._taken = TakenRoom()
        self._lines: dict[Line, WaitQueue] = {}
        self._heard_at: dict[str, float] = {}
        """When each batcher was heard of, the one that was silent for longest first."""
        self._away: dict[str, float] = {}
        """Batchers that get no rows until then; infinity: that is lost, until it is heard of again."""
        self._ticked_at = math.inf
        self._outgoing = Outgoing()
        self._cancels: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By batcher, rows and their attempts."""
        self._gaps: dict[str, SentRow] = {}
        """Rows of which frames are missing."""
        self._scheduled = False

    def __contains__(self, row_id: str) -> bool:
        """Whether the row is waited for."""
        return row_id in self._rows

    @property
    def task_names(self) -> set[str]:
        """What the tasks of all rows call their models."""
        return {row.task.model for row in self._rows.values()}

    # Rows.

    def send(self, row: SentRow, now: float) -> None:
        """Sends a new row."""
        self._rows[row.task.request_id] = row
        row.sent_at, row.size = now, row.task.ByteSize()
        row.line = line_of(row.task.model, row.task.priority_class)
        urgent = row.line.priority_class == URGENT_CLASS
        if now < self._busy_until and urgent and not row.task.HasField("coalesce_ms"):
            row.task.coalesce_ms = self._interval_ms
        line = self._lines.get(row.line)
        if (line is not None and line.has(row.task.tenant)) or not self._place(row, now):
            self._wait_in_line(row, now)

    def wake(self, reader: Callable[[], None], row_id: str, now: float) -> None:
        """Wakes the ``reader`` of a row that has brought more tokens, or later if their worker did not gather them."""
        row = self._rows.get(row_id)
        if now >= self._busy_until or row is None or row.task.HasField("coalesce_ms"):
            reader()
            return
        if not self._wakes:
            self.on_later(self._interval_ms / 1e3, self._wake_readers)
        self._wakes[reader] = None

    def _wake_readers(self) -> None:
        wakes, self._wakes = self._wakes, {}
        for wake in wakes:
            wake()

    def cancel(self, row_id: str) -> None:
        """Nobody waits for the row any more."""
        row = self.forget(row_id)
        if row and row.batcher:
            self._cancel(row.batcher, row_id, row.task.attempt)

    def headers(self, row_id: str) -> Mapping[str, str]:
        """What the messages about a row carry; nothing when nobody waits for it."""
        row = self._rows.get(row_id)
        return {} if row is None else row.headers

    def forget(self, row_id: str) -> SentRow | None:
        """The row has ended."""
        self._gaps.pop(row_id, None)
        row = self._rows.pop(row_id, None)
        if row is not None:
            if row.waits:
                self._lines[row.line].remove(row)
                row.waits = False
                self._drop_empty(row.line)
            self._free(row)
            row.taken()
        return row

    def release(self, row: Row) -> None:
        """Nothing more is expected of a row, whether or not it has ended."""
        if row.final is None:
            self.cancel(row.row_id)
        else:
            self.forget(row.row_id)

    def ask(self, row_id: str) -> None:
        """Frames of the row are missing."""
        row = self._rows.get(row_id)
        if row and row.batcher:
            self._schedule()
            self._gaps[row_id] = row

    # What batchers say.

    def heard(self, batcher: str, now: float) -> None:
        """Something came from a batcher."""
        self._heard_at.pop(batcher, None)
        self._heard_at[batcher] = now
        if len(self._heard_at) > BATCHERS_MAX:
            del self._heard_at[next(iter(self._heard_at))]
        if not now < self._away.get(batcher, now) < math.inf:
            self._away.pop(batcher, None)

    def accepts(
        self, batcher: str, row_id: str, attempt: int, now: float, *, waits: bool = False
    ) -> bool:
        """A batcher speaks of a row: whether it is its owner. An earlier owner is told that nobody waits.

        ``waits``: the row may be waiting there.
        """
        row = self._owned(batcher, row_id, attempt)
        if row is None:
            self._cancel(batcher, row_id, attempt)
            return False
        if not waits:
            self._free(row)
        row.held = row.was_held = True
        row.outlived |= row.questions > 0
        row.questions = 0
        patience = WAITING_FACTOR if waits and not row.attempt.token_ids else 1
        row.ask_at = now + patience * self._stall_s
        return True

    def unknown(self, batcher: str, refs: Iterable[frame_pb2.TaskRef], now: float) -> None:
        """A batcher does not have rows that it was asked about.

        If it had them it may be a new process, without all others: those that wait are asked about before their time.
        """
        forgot = False
        for ref in refs:
            row = self._owned(batcher, ref.request_id, ref.attempt)
            if row is not None:
                forgot |= row.held
                self._recover(row, now)
        if forgot:
            for row in self._rows.values():
                if row.batcher == batcher and row.held:
                    row.ask_at = min(row.ask_at, now)

    def returned(self, batcher: str, frame: frame_pb2.Frame, now: float) -> None:
        """A batcher gives a row back: it goes elsewhere, unless it was lost too often."""
        row = self._owned(batcher, frame.request_id, frame.attempt)
        if row is None:
            return
        cause, error = frame.final.return_cause, frame.final.error
        worker_lost = cause == frame_pb2.RETURN_CAUSE_WORKER_LOST
        losses = row.losses_now() + worker_lost
        self._take_back(row, "worker")
        if cause == frame_pb2.RETURN_CAUSE_UNSPECIFIED:
            self._away[batcher] = now + AVOID_S
        else:  # A worker had it, and its tenant was charged.
            row.was_held = True
            row.task.charged_tokens = len(row.task.prompt_token_ids) + row.attempt.completion_tokens
        if losses >= LOSSES_MAX:
            self._give_up(row, error.message)
            return
        self._note_losses(row, losses)
        self.resent[*row.line, "worker"] += worker_lost
        row.needs_room = error.reason == Overloaded.reason and not cause
        if row.needs_room or not self._place(row, now):
            self._wait_in_line(row, now)

    def gone(self, batcher: str, now: float) -> None:
        """A batcher is gone with all its rows: NATS says that nobody has subscribed for it, or it is silent."""
        self._away[batcher] = math.inf
        for row in [row for row in self._rows.values() if row.batcher == batcher]:
            if row.task.request_id in self._rows:
                self._recover(row, now)

    # Time.

    def tick(self, now: float) -> None:
        """Asks about silent rows, sends lost ones again."""
        if now - self._ticked_at > self._stall_s:
            self.restart(now)  # this process was stopped
            return
        self._ticked_at = now
        for row in [row for row in self._rows.values() if row.ask_at <= now]:
            # The end of one may end others of its request, and the loss of its batcher sends all of them again.
            if row.task.request_id in self._rows and row.ask_at <= now:
                self._check(row, now)
        for line in self._lines.values():
            line.freed = True  # reports may have brought room
        self.fill(now)

    def late(self, lag_s: float, now: float) -> None:
        """The event loop came so much later than it should: with more than `LAG_S` this gateway is busy."""
        if lag_s > LAG_S and self._interval_ms:
            self._busy_until = now + BUSY_S

    def restart(self, now: float) -> None:
        """This gateway heard nothing for a while, through no fault of the batchers: their time begins anew."""
        self._ticked_at = now
        self._away.clear()
        for row in self._rows.values():
            row.questions = 0
            if row.batcher:
                row.ask_at = now + self._stall_s

    def drain(self) -> Outgoing:
        """Everything that is to be sent since the last call."""
        outgoing, self._outgoing = self._outgoing, Outgoing()
        asked: defaultdict[str, list[TaskProgress]] = defaultdict(list)
        for row in self._gaps.values():
            name, next_index = row.task.request_id, row.attempt.next_index
            asked[row.batcher].append(
                TaskProgress(request_id=name, attempt=row.task.attempt, next_index=next_index)
            )
        for batcher, attempts in self._cancels.items():
            refs = [frame_pb2.TaskRef(request_id=name, attempt=n) for name, n in attempts.items()]
            for some in _parts(refs):
                self._tell(outgoing, batcher, cancel=Cancel(tasks=some))
        for batcher, rows in asked.items():
            for part in _parts(rows):
                self._tell(outgoing, batcher, query=TaskQuery(tasks=part))
        outgoing.questions = bool(asked)
        self._cancels.clear()
        self._gaps.clear()
        self._scheduled = False
        return outgoing

    # Steps of recovery.

    def _check(self, row: SentRow, now: float) -> None:
        """A row is due: asks about it, or sends it again."""
        if row.waits:
            # One that no batcher has taken yet waits for a limited time while there is none.
            row.ask_at = min(self._lines[row.line].without_since, now) + NO_BATCHER_S
            if row.ask_at <= now:
                message = f"no batcher took the request for {NO_BATCHER_S:g} s"
                self._fail(row, ModelUnavailable(message, retry_after_s=RETRY_AFTER_S))
        elif self._away.get(row.batcher) == math.inf:
            self._recover(row, now)
        elif row.questions >= 2 and self._heard_at.get(row.batcher, 0.0) < row.asked_at:
            self.gone(row.batcher, now)
        elif row.questions >= QUESTIONS_MAX:
            self._away[row.batcher] = math.inf
            self._recover(row, now)
        else:
            self._question(row, now)

    def _question(self, row: SentRow, now: float) -> None:
        if not row.questions:
            row.asked_at = now
        row.questions += 1
        row.ask_at = now + self._stall_s
        self.ask(row.task.request_id)

    def _recover(self, row: SentRow, now: float) -> None:
        """The batcher of a row is lost: sends the row again, if there is another one."""
        # What never reached the batcher did no harm there, nor what it outlived.
        losses = row.losses_now() + (row.held and not row.outlived)
        if losses >= LOSSES_MAX:
            self._give_up(row, "its batcher was lost")
        elif self._place(row, now):
            self._note_losses(row, losses)
            self.resent[*row.line, "batcher"] += 1
        elif row.was_held:
            # There is no other batcher: that of the row may come back, and still have it.
            if now - row.asked_at >= self._stall_s:
                row.questions = 0
                self._question(row, now)
            row.ask_at = now + RETRY_S
        else:
            self._take_back(row, "batcher")
            self._wait_in_line(row, now)

    def _note_losses(self, row: SentRow, losses: int) -> None:
        row.losses = losses
        row.task.last_try = losses == LOSSES_MAX - 1
        if losses:
            row.task.coalesce_ms = 0  # the next token shows that the row is not to blame

    def _give_up(self, row: SentRow, why: str) -> None:
        """A row was lost too often: it becomes a dead letter."""
        reason = f"{LOSSES_MAX} times in succession no worker got on with this request: {why}"
        self._schedule()
        self._outgoing.dead.append((row, reason))
        self.given_up[row.line] += 1
        self._fail(row, EngineFailed(reason))

    def _place(self, row: SentRow, now: float) -> bool:
        """Sends the row to a batcher; False when there is none with room for it."""
        without = {one for one, until in self._away.items() if until > now}
        urgent = row.line.priority_class == URGENT_CLASS
        if row.needs_room and not urgent:
            without |= {
                one
                for one, room in self._batchers.rooms(row.line, now).items()
                if not self._taken.fits(row, one, room)
            }
        batcher = self._batchers.choose(row.task.model, without, now)
        if batcher is None:
            return False
        if row.batcher:
            self._take_back(row, "batcher")
        row.batcher, row.questions = batcher, 0
        row.waits = row.held = row.needs_room = row.outlived = False
        row.ask_at = now + self._stall_s
        row.tokens = row.attempt.completion_tokens
        self._taken.take(row, batcher)
        row.task.produced_token_ids[:] = row.attempt.token_ids
        row.task.timeout_ms = min(max(math.ceil((row.deadline - now) * 1000), 1), MS_MAX)
        row.task.age_ms = min(int((now - row.sent_at) * 1000), MS_MAX)
        self._outgoing.tasks.append((batcher, row))
        if row.line.priority_class != BULK_CLASS or row.task.coalesce_ms <= READ_MS:
            self._schedule(now if urgent else math.inf)
        elif len(self._outgoing.tasks) == 1:
            self.on_later(UNREAD_S, self.on_due)
        row.taken()
        return True

    def _take_back(self, row: SentRow, lost: str) -> None:
        """The row has no batcher any more; ``lost``: what it goes on without, should its answer have begun."""
        row.batcher = ""
        self._gaps.pop(row.task.request_id, None)
        row.task.attempt = max(row.task.attempt, row.attempt.attempt) + 1
        row.attempt.fence(row.task.attempt, lost)
        self._free(row)

    # Room.

    @property
    def waiting(self) -> Mapping[Line, int]:
        """How many rows wait here for room."""
        return {line: len(rows) for line, rows in list(self._lines.items())}

    def waited_s(self, now: float) -> Mapping[Line, float]:
        """Tell how long the oldest of them has waited, in seconds."""
        return {line: max(0.0, now - rows.since) for line, rows in list(self._lines.items())}

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Tenants that differ from 1 have these from now on, also where rows wait."""
        self._taken.weights = weights
        for line in self._lines.values():
            line.use_weights(weights)

    def fill(self, now: float) -> None:
        """Sends rows that have waited, as far as there is room again."""
        for name, line in list(self._lines.items()):
            if line.freed:
                line.freed = False
                self._fill_line(name, line, now)

    def _fill_line(self, name: Line, line: WaitQueue, now: float) -> None:
        if all(self._away.get(one, now) > now for one in self._batchers.rooms(name, now)):
            line.without_since = min(line.without_since, now)
            return
        line.without_since = math.inf
        while sent := next((one for one in line.heads() if self._place(one, now)), None):
            line.serve(sent)
        self._drop_empty(name)

    def _wait_in_line(self, row: SentRow, now: float) -> None:
        """The row waits for room; while there is no batcher at all, for one."""
        row.waits, row.waits_since = True, now
        row.ask_at = math.inf if row.was_held else now + NO_BATCHER_S
        self._lines.setdefault(row.line, WaitQueue(self._taken.weights)).add(row)

    def _drop_empty(self, name: Line) -> None:
        if not self._lines[name]:
            del self._lines[name]

    def _free(self, row: SentRow) -> None:
        if self._taken.free(row) and (line := self._lines.get(row.line)) is not None:
            line.freed = True
            self._schedule()

    def _fail(self, row: SentRow, error: SluiceError) -> None:
        self.cancel(row.task.request_id)
        self.on_failed(row.task.request_id, error)

    # Messages.

    def _owned(self, batcher: str, row_id: str, attempt: int) -> SentRow | None:
        """The row that a batcher speaks of, if it has it."""
        row = self._rows.get(row_id)
        if row is None or row.batcher != batcher:
            return None
        return row if 0 <= attempt - row.task.attempt < COUNTED_MAX else None

    def _cancel(self, batcher: str, row_id: str, attempt: int) -> None:
        if len(row_id) > ROW_ID_CHARS_MAX or len(self._cancels[batcher]) >= CANCELS_MAX:
            return  # it speaks of the row again, and is told then
        self._schedule()
        self._cancels[batcher][row_id] = attempt

    def _tell(self, outgoing: Outgoing, batcher: str, **message: Any) -> None:
        outgoing.control.append((batcher, ControlMessage(gateway=self._gateway, **message)))

    def _schedule(self, now: float = math.inf) -> None:
        """``now``: of an interactive row, which waits for others while this gateway is busy and they come often."""
        if now < self._busy_until:
            self._recent.append(now)
        if not self._scheduled:
            self._scheduled, wait_s = True, 0.0
            if now - self._recent[0] < RECENT_S:
                wait_s = max(self._send_at - now, 0.0)
                self._send_at = now + wait_s + SEND_S
            self.on_later(wait_s, self.on_due)


def _parts(rows: list[_T]) -> Iterator[list[_T]]:
    """As many rows as one message may have."""
    return (rows[at : at + QUERY_ROWS_MAX] for at in range(0, len(rows), QUERY_ROWS_MAX))
