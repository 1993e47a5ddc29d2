"""Which batcher has which run, and the recovery of runs that were lost (docs/internals/wire.md, Recovery).

The gateway leads: it knows every run that somebody waits for, and the tokens that it has of it.

1. A run goes to the batcher with the fewest tasks of those with capacity for it, and waits here while none has any
   (`gateway.streaming.capacity`). One that a batcher had before needs no new capacity, and goes first.
2. A run that was silent for `stall_s` is queried, and again after the same time. It is lost when its batcher does not
   know it. When the batcher has said nothing at all since the first of two queries, all its runs are lost.
3. NATS reports at once when nobody has subscribed for a batcher: then they are lost too.
4. A batcher whose worker is lost returns the runs that it had given to it.
5. A lost run is sent again, wherever a batcher is, with the tokens that have arrived and the next attempt number, which
   fences the earlier owner out. While no other batcher is there it stays where it was: the batcher may come back.
6. A run that was lost `LOSSES_MAX` times in succession without a new token, with its worker or with its batcher, fails
   and becomes a dead letter: it may be the cause. Before that it is tried alone: see `Task.last_try`. What a batcher
   returns because it drains, or has no capacity, does not count.
7. Silence proves nothing while this gateway itself was cut off or suspended: then everything is queried anew.

Neither clock nor I/O: the owner calls `tick`, sends what `drain` returns when `notify` was called, and ends the runs of
`take_failed`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from gateway.streaming.capacity import UsedCapacity, WaitQueue
from gateway.streaming.load_table import ModelLoadTable
from gateway.streaming.model_run import RELEASED, ModelRun, RunClass
from sluice.errors import RETRY_AFTER_S, EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import Cancel, ControlMessage, TaskProgress, TaskQuery

_T = TypeVar("_T")

LOSSES_MAX: Final = 5
"""A run that was lost so often without a new token is a dead letter: few enough to spare the workers."""
NO_BATCHER_S: Final = 30.0
"""A run that no batcher has accepted yet fails when none could for this long, seconds: longer than a restart."""
RETRY_S: Final = 0.1
"""Interval at which a run whose batcher may come back is tried with another one, seconds."""
AVOID_S: Final = 1.0
"""How long a batcher that returned a run gets no other, seconds: about the interval of its reports."""
WAITING_FACTOR: Final = 4
"""A run that waits in a batcher is queried this many times less often than one with tokens."""
QUERIES_MAX: Final = 4
"""A run that a batcher did not answer about this often is lost, although the batcher is alive."""
MS_MAX: Final = 2**32 - 1
"""Largest time in a task, milliseconds."""
QUERY_RUNS_MAX: Final = 4096
"""Runs in one query or cancel message; it stays far below NATS's limit of 1 MiB."""
CANCELS_MAX: Final = 16_384
"""Cancels that wait for one batcher; more are dropped. Its next message about such a run brings another cancel."""
RUN_ID_CHARS_MAX: Final = 128
"""Longest run id; a longer one belongs to no gateway and is not kept."""
BATCHERS_MAX: Final = 1024
"""Batchers whose last message is remembered; those that were silent for longest are forgotten."""


class DeadLetter(NamedTuple):
    """A run that is given up."""

    model: str
    priority_class: str
    task: bytes
    headers: Mapping[str, str]
    reason: str


@dataclass
class Outgoing:
    """Messages to batchers, sent in the order of the attributes.

    Attributes:
        tasks: batcher and run.
        control: batcher and message; an empty batcher: to all.
        dead: to be stored as dead letters.
        has_queries: whether a batcher is queried: the owner must find out whether NATS itself answers (`restart`).
    """

    tasks: list[tuple[str, ModelRun]] = field(default_factory=list)
    control: list[tuple[str, ControlMessage]] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    has_queries: bool = False


@dataclass(eq=False)
class Dispatch:
    """All runs that this gateway waits for.

    Attributes:
        gateway: id of this gateway.
        loads: says which batchers there are.
        stall_s: longest silence of a run, seconds.
        notify: called when `drain` may have something to send: with the run if it is a task, else with None.
        resent: runs that were lost and sent again, by model, class and what was lost: "worker" or "batcher".
        given_up: runs that became dead letters.
    """

    gateway: str
    loads: ModelLoadTable
    stall_s: float
    notify: Callable[[ModelRun | None], None]

    def __post_init__(self) -> None:
        self.resent: Counter[tuple[str, str, str]] = Counter()
        self.given_up: Counter[RunClass] = Counter()
        self._runs: dict[str, ModelRun] = {}
        self._used = UsedCapacity()
        self._weights: Mapping[str, float] = {}
        self._queues: dict[RunClass, WaitQueue] = {}
        self._last_message_at: dict[str, float] = {}
        """By batcher, the one that was silent for longest first."""
        self._avoided_until: dict[str, float] = {}
        """Batchers that get no runs; infinity: until they send a message."""
        self._ticked_at = math.inf
        self._outgoing = Outgoing()
        self._failed: list[tuple[ModelRun, SluiceError]] = []
        self._cancels: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By batcher: runs and the attempts up to which they are cancelled."""
        self._queries: dict[str, ModelRun] = {}

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    @property
    def task_names(self) -> set[str]:
        """The models of all runs, as tasks name them."""
        return {run.task.model for run in self._runs.values()}

    # Runs.

    def send(self, run: ModelRun, now: float) -> None:
        """Send a new run, or let it wait: for capacity, or behind others of its tenant."""
        self._runs[run.run_id] = run
        run.sent_at, run.task_bytes = now, run.task.ByteSize()
        queue = self._queues.get(run.run_class)
        if (queue is not None and queue.has(run.task.tenant)) or not self._place(run, now):
            self._enqueue(run, now)

    def release(self, run: ModelRun) -> None:
        """Stop waiting for a run; cancel it if it has not ended."""
        batcher = run.batcher if run.final is None else ""
        if self._remove(run) and batcher:
            self._cancel(batcher, run.run_id, run.attempt_number)

    def query(self, run: ModelRun) -> None:
        """Request the missing frames of a run."""
        if run.batcher and run.run_id in self._runs:
            self._queries[run.run_id] = run
            self.notify(None)

    # What batchers send.

    def note_message(self, batcher: str, now: float) -> None:
        """Note that a batcher has sent a message."""
        self._last_message_at.pop(batcher, None)
        self._last_message_at[batcher] = now
        if len(self._last_message_at) > BATCHERS_MAX:
            del self._last_message_at[next(iter(self._last_message_at))]
        # A batcher that returned a run is avoided for its time even though it sends messages.
        if not now < self._avoided_until.get(batcher, now) < math.inf:
            self._avoided_until.pop(batcher, None)

    def accepts(
        self, batcher: str, run_id: str, attempt: int, now: float, *, waits: bool = False
    ) -> bool:
        """Note a batcher's message about a run. Return whether it owns the run; else cancel it there.

        Args:
            batcher: that sends it.
            run_id: of the run.
            attempt: that the batcher has.
            now: monotonic seconds.
            waits: whether the run may be waiting there.
        """
        run = self._owned(batcher, run_id, attempt)
        if run is None:
            self._cancel(batcher, run_id, attempt)
            return False
        if not waits:
            self._free(run)
        run.is_accepted = run.was_accepted = True
        run.survived_query |= run.queries > 0
        run.queries = 0
        patience = WAITING_FACTOR if waits and not run.token_ids else 1
        run.check_at = now + patience * self.stall_s
        return True

    def take_unknown(self, batcher: str, refs: Iterable[frame_pb2.TaskRef], now: float) -> None:
        """Recover the queried runs that a batcher does not have.

        If it had them it may be a new process, without all others: those are queried before their time.
        """
        has_forgotten = False
        for ref in refs:
            run = self._owned(batcher, ref.request_id, ref.attempt)
            if run is not None:
                has_forgotten |= run.is_accepted
                self._recover(run, now)
        if has_forgotten:
            for run in self._runs.values():
                if run.batcher == batcher and run.is_accepted:
                    run.check_at = min(run.check_at, now)

    def take_returned(self, batcher: str, frame: frame_pb2.Frame, now: float) -> None:
        """Send a run again that its batcher returns, or let it wait; give it up if it was lost too often."""
        run = self._owned(batcher, frame.request_id, frame.attempt)
        if run is None:
            return
        cause, error = frame.final.return_cause, frame.final.error
        is_worker_lost = cause == frame_pb2.RETURN_CAUSE_WORKER_LOST
        losses = run.current_losses + is_worker_lost
        self._take_back(run, "worker")
        if cause == frame_pb2.RETURN_CAUSE_UNSPECIFIED:
            self._avoided_until[batcher] = now + AVOID_S
        else:  # A worker had it, and its tenant was charged.
            run.was_accepted = True
            run.task.charged_tokens = len(run.task.prompt_token_ids) + run.completion_tokens
        if losses >= LOSSES_MAX:
            self._give_up(run, error.message)
            return
        self._set_losses(run, losses)
        self.resent[*run.run_class, "worker"] += is_worker_lost
        run.needs_capacity = error.reason == Overloaded.reason and not cause
        if run.needs_capacity or not self._place(run, now):
            self._enqueue(run, now)

    def lose_batcher(self, batcher: str, now: float) -> None:
        """Recover all runs of a batcher that has no subscription, or is silent."""
        self._avoided_until[batcher] = math.inf
        for run in [run for run in self._runs.values() if run.batcher == batcher]:
            # The end of one may have ended others.
            if run.run_id in self._runs:
                self._recover(run, now)

    # Time.

    def tick(self, now: float) -> None:
        """Query silent runs, and send lost ones again."""
        if now - self._ticked_at > self.stall_s:
            self.restart(now)  # this process was suspended
            return
        self._ticked_at = now
        for run in [run for run in self._runs.values() if run.check_at <= now]:
            # The loss of a batcher sends all its runs again, which moves their time.
            if run.run_id in self._runs and run.check_at <= now:
                self._check(run, now)
        for queue in self._queues.values():
            queue.may_have_capacity = True  # reports may have brought some
        self._fill(now)

    def restart(self, now: float) -> None:
        """Give batchers their time anew: this gateway received nothing for a while, through no fault of theirs."""
        self._ticked_at = now
        self._avoided_until.clear()
        for run in self._runs.values():
            run.queries = 0
            if run.batcher:
                run.check_at = now + self.stall_s

    # What is to be sent, and what has failed.

    def drain(self, now: float) -> Outgoing:
        """Return everything that is to be sent since the last call, and what may be sent by now."""
        if self._queues:
            self._fill(now)
        outgoing, self._outgoing = self._outgoing, Outgoing()
        # A run may have ended, or moved on, before its message left.
        outgoing.tasks = [task for task in outgoing.tasks if task[1].batcher == task[0]]
        for batcher, attempts in self._cancels.items():
            refs = [frame_pb2.TaskRef(request_id=name, attempt=n) for name, n in attempts.items()]
            for part in _parts(refs):
                message = ControlMessage(gateway=self.gateway, cancel=Cancel(tasks=part))
                outgoing.control.append((batcher, message))
        queried: defaultdict[str, list[TaskProgress]] = defaultdict(list)
        for run in self._queries.values():
            name, attempt, index = run.run_id, run.attempt_number, run.next_index
            queried[run.batcher].append(
                TaskProgress(request_id=name, attempt=attempt, next_index=index)
            )
        for batcher, rows in queried.items():
            for progress in _parts(rows):
                message = ControlMessage(gateway=self.gateway, query=TaskQuery(tasks=progress))
                outgoing.control.append((batcher, message))
        outgoing.has_queries = bool(queried)
        self._cancels.clear()
        self._queries.clear()
        return outgoing

    def take_failed(self) -> list[tuple[ModelRun, SluiceError]]:
        """Return the runs that cannot be answered, since the last call; nothing waits for them here any more."""
        failed, self._failed = self._failed, []
        return failed

    # Steps of recovery.

    def _check(self, run: ModelRun, now: float) -> None:
        """Query a run that is due, or send it again."""
        if run.is_queued:
            # One that no batcher has accepted yet waits for a limited time while there is none.
            run.check_at = min(self._queues[run.run_class].no_batcher_since, now) + NO_BATCHER_S
            if run.check_at <= now:
                message = f"no batcher accepted the request for {NO_BATCHER_S:g} s"
                self._fail(run, ModelUnavailable(message, retry_after_s=RETRY_AFTER_S))
        elif self._avoided_until.get(run.batcher) == math.inf:
            self._recover(run, now)
        elif run.queries >= 2 and self._last_message_at.get(run.batcher, 0.0) < run.queried_at:
            self.lose_batcher(run.batcher, now)
        elif run.queries >= QUERIES_MAX:
            self._avoided_until[run.batcher] = math.inf
            self._recover(run, now)
        else:
            self._query_again(run, now)

    def _query_again(self, run: ModelRun, now: float) -> None:
        if not run.queries:
            run.queried_at = now
        run.queries += 1
        run.check_at = now + self.stall_s
        self.query(run)

    def _recover(self, run: ModelRun, now: float) -> None:
        """Send a run whose batcher is lost to another one, if there is one."""
        # What never reached the batcher did no harm there, nor what it survived.
        losses = run.current_losses + (run.is_accepted and not run.survived_query)
        if losses >= LOSSES_MAX:
            self._give_up(run, "its batcher was lost")
        elif self._place(run, now):
            self._set_losses(run, losses)
            self.resent[*run.run_class, "batcher"] += 1
        elif run.was_accepted:
            # There is no other batcher: that of the run may come back, and still have it.
            if now - run.queried_at >= self.stall_s:
                run.queries = 0
                self._query_again(run, now)
            run.check_at = now + RETRY_S
        else:
            self._take_back(run, "batcher")
            self._enqueue(run, now)

    def _set_losses(self, run: ModelRun, losses: int) -> None:
        run.losses = losses
        run.task.last_try = losses == LOSSES_MAX - 1
        if losses:
            run.task.coalesce_ms = 0  # the next token shows that the run is not to blame

    def _give_up(self, run: ModelRun, cause: str) -> None:
        """Make a run that was lost too often a dead letter."""
        reason = (
            f"{LOSSES_MAX} workers or batchers in succession were lost with this request: {cause}"
        )
        letter = DeadLetter(*run.run_class, run.task.SerializeToString(), run.headers, reason)
        self._outgoing.dead.append(letter)
        self.given_up[run.run_class] += 1
        self.notify(None)
        self._fail(run, EngineFailed(reason))

    def _place(self, run: ModelRun, now: float) -> bool:
        """Send a run to a batcher; return False when there is none with capacity for it."""
        excluded = {name for name, until in self._avoided_until.items() if until > now}
        if run.needs_capacity and not run.is_urgent:
            excluded |= {
                name
                for name, capacity in self.loads.capacities(run.run_class, now).items()
                if not self._used.fits(run, name, capacity)
            }
        batcher = self.loads.choose(run.task.model, excluded, now)
        if batcher is None:
            return False
        if run.batcher:
            self._take_back(run, "batcher")
        if not run.attempt_number:
            run.queued_s = now - run.sent_at
        run.batcher, run.queries = batcher, 0
        run.is_queued = run.is_accepted = run.needs_capacity = run.survived_query = False
        run.check_at = now + self.stall_s
        if run.next_index:
            run.tokens_when_sent = run.completion_tokens
            run.task.produced_token_ids[:] = run.token_ids
        if not run.is_urgent:
            self._used.take(run, batcher)
        run.task.timeout_ms = min(max(math.ceil((run.deadline - now) * 1000), 1), MS_MAX)
        run.task.age_ms = min(int((now - run.sent_at) * 1000), MS_MAX)
        self._outgoing.tasks.append((batcher, run))
        self.notify(run)
        return True

    def _take_back(self, run: ModelRun, lost: str) -> None:
        """Take a run from its batcher; `lost`: what it goes on without, should its answer have begun."""
        run.batcher = ""
        self._queries.pop(run.run_id, None)
        run.start_attempt(lost)
        self._free(run)

    # Capacity.

    @property
    def queued(self) -> Mapping[RunClass, int]:
        """Number of runs that wait here for capacity; metrics read it on other threads."""
        return {run_class: len(queue) for run_class, queue in list(self._queues.items())}

    def queued_s(self, now: float) -> Mapping[RunClass, float]:
        """Return how long the tenants' first runs have waited at most, in seconds; called on other threads too."""
        queues = list(self._queues.items())
        return {run_class: max(0.0, now - queue.oldest_at) for run_class, queue in queues}

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Share capacity by the `weights` of tenants that differ from 1, also where runs wait."""
        self._weights = weights
        self._used.use_weights(weights)
        for queue in self._queues.values():
            queue.use_weights(weights)

    def _fill(self, now: float) -> None:
        """Send runs that wait, as far as there may be capacity again."""
        for run_class, queue in list(self._queues.items()):
            if queue.may_have_capacity:
                queue.may_have_capacity = False
                self._send_queued(run_class, queue, now)

    def _send_queued(self, run_class: RunClass, queue: WaitQueue, now: float) -> None:
        batchers = self.loads.capacities(run_class, now)
        if all(self._avoided_until.get(name, now) > now for name in batchers):
            queue.no_batcher_since = min(queue.no_batcher_since, now)
            return
        queue.no_batcher_since = math.inf
        while sent := next((run for run in queue.heads() if self._place(run, now)), None):
            queue.serve(sent)
        self._drop_empty(run_class)

    def _enqueue(self, run: ModelRun, now: float) -> None:
        """Let a run wait for capacity; while there is no batcher at all, for one."""
        run.is_queued, run.queued_at = True, now
        run.check_at = math.inf if run.was_accepted else now + NO_BATCHER_S
        self._queues.setdefault(run.run_class, WaitQueue(self._weights)).add(run)

    def _drop_empty(self, run_class: RunClass) -> None:
        if not self._queues[run_class]:
            del self._queues[run_class]

    def _free(self, run: ModelRun) -> None:
        if self._used.free(run) and (queue := self._queues.get(run.run_class)) is not None:
            queue.may_have_capacity = True
            self.notify(None)

    # The end of a run.

    def _fail(self, run: ModelRun, error: SluiceError) -> None:
        self.release(run)
        self._failed.append((run, error))

    def _remove(self, run: ModelRun) -> bool:
        """Forget a run and release its task; return False when it is not waited for."""
        if self._runs.pop(run.run_id, None) is None:
            return False
        self._queries.pop(run.run_id, None)
        if run.is_queued:
            self._queues[run.run_class].remove(run)
            run.is_queued = False
            self._drop_empty(run.run_class)
        self._free(run)
        run.batcher = ""
        run.task = RELEASED
        return True

    # Messages.

    def _owned(self, batcher: str, run_id: str, attempt: int) -> ModelRun | None:
        """Return the run that a batcher sends a message about, if it is its last owner."""
        run = self._runs.get(run_id)
        if run is None or run.batcher != batcher or run.attempt_number != attempt:
            return None
        return run

    def _cancel(self, batcher: str, run_id: str, attempt: int) -> None:
        cancels = self._cancels[batcher]
        if len(run_id) > RUN_ID_CHARS_MAX or len(cancels) >= CANCELS_MAX:
            return  # it sends a message about the run again, and is answered then
        cancels[run_id] = max(attempt, cancels.get(run_id, 0))
        self.notify(None)


def _parts(rows: list[_T]) -> Iterator[list[_T]]:
    """Yield as many rows at a time as one message may have."""
    return (rows[at : at + QUERY_RUNS_MAX] for at in range(0, len(rows), QUERY_RUNS_MAX))
