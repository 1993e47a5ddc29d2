"""Request table: all requests of one model in this batcher. Events are method calls, consequences are actions.

The owner calls `advance` after events and at the time that it returned, and then `take`s the
actions. The rules (docs/internals/wire.md):

- The gateway of a request leads its recovery: it asks about silent requests, and sends lost ones
  again with the tokens that it has and a higher attempt. So a request that this table forgets is
  never lost, and nothing here is durable.
- A request that its worker cannot continue returns to its gateway at once and is forgotten: the
  worker was lost, returned it, or did not accept it.
- A worker that returns requests or is lost with some several times in a row gets one request at a
  time, after growing pauses, until one gets a token: see `WorkerBreaker`.
- An ended request is kept for `ENDED_S`, in case its gateway misses frames.
- A batcher that drains returns its requests to their gateways.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, cast

from batcher.core.frames import Outbox, final_frame, merge, part_of
from batcher.core.queued_request import QueuedRequest, RequestState
from batcher.core.scheduler.entry import Batch
from batcher.core.scheduler.queue import Queue
from batcher.core.workers import WorkerState, WorkerTable
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.settings.batching import Policy, coalesce_s

ENDED_S: Final = 3.0
"""How long ended requests are kept, in seconds."""
ENDED_MAX: Final = 2048
"""How many ended requests are kept."""
ENDED_LATE_S: Final = 1.0
"""How much longer ended requests may be kept, in seconds, so that several are dropped together."""
_WHOLE: Final = frozenset({frame_pb2.TASK_END_STOP, frame_pb2.TASK_END_LENGTH})
_NOT_ACCEPTED: Final = frame_pb2.RETURN_CAUSE_NOT_ACCEPTED
_LOST: Final = frame_pb2.TaskError(reason=EngineFailed.reason, message="the worker was lost")


class Actions:
    """Actions for the event loop, which does the I/O; each list is in order."""

    def __init__(self) -> None:
        self.added: list[QueuedRequest] = []
        """Requests that have arrived."""
        self.batches: list[Batch[QueuedRequest]] = []
        """Batches to send."""
        self.ended: list[QueuedRequest] = []
        """Requests that have ended, return to their gateways, or were forgotten while active."""
        self.bundles: list[tuple[str, frame_pb2.FrameBundle]] = []
        """Messages by gateway."""
        self.cancels: dict[str, list[frame_pb2.TaskRef]] = {}
        """References of requests that workers must drop, by worker; later attempts continue."""
        self.demands: list[tuple[str, Sequence[int]]] = []
        """Counts of waiting requests by class, by worker."""
        self.waiting: Sequence[int] = ()
        """Requests that still wait, by class."""


class RequestTable:
    """Requests of one model and their queue.

    Attributes:
        requests: all of them by id; read-only for others.
        queue: the scheduler's queue; others only read it or call `reconfigure`.
        workers: workers of the model, by a name that survives restarts.
        active: number of requests that have not ended.
        size: size of the tasks of active requests, in bytes.
    """

    def __init__(
        self,
        batcher: str,
        *,
        policy: Policy,
        weights: Mapping[str, float] | None = None,
        workers: WorkerTable | None = None,
    ) -> None:
        self.queue = Queue(policy, weights)
        self.workers = workers or WorkerTable()
        self.active = 0
        self.size = 0
        self._batcher = batcher
        self.requests: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._outbox = Outbox(batcher)
        self._ended: deque[tuple[float, QueuedRequest]] = deque()
        """Ended requests with the time at which each is forgotten, oldest first."""
        self._actions = Actions()
        self._batches = 0
        self._has_demand = False
        """Whether a worker was told that requests wait for it."""
        self._draining = False

    @property
    def pending(self) -> bool:
        """Whether there are messages for gateways, or requests that may go to a worker."""
        return bool(self.queue.order.waiting or self._outbox)

    def take(self) -> Actions:
        """Return the actions since the last call."""
        actions, self._actions = self._actions, Actions()
        actions.bundles = self._outbox.take()
        return actions

    # Messages from gateways.

    def add(self, request: QueuedRequest, now: float) -> None:
        """Add a request; it replaces an earlier attempt.

        If this attempt or a later one is here, it is only acknowledged. A draining batcher returns it at once.
        """
        earlier = self.requests.get(request.request_id)
        if earlier is not None:
            # A duplicate, or late: the gateway has sent this request again meanwhile.
            if earlier.attempt >= request.attempt:
                self._outbox.acknowledge(earlier)
                return
            # A higher attempt replaces it; its worker drops the old one by the attempt number.
            self._close(earlier, now)
        self.requests[request.request_id] = request
        self.active += 1
        self.size += request.size
        self._actions.added.append(request)
        if not math.isinf(request.deadline):
            heappush(self._deadlines, (request.deadline, request.request_id))
        self.queue.add(request, now)
        # A draining batcher accepts nothing: the gateway sends it to another one.
        if self._draining:
            self._return_to_gateway(request, now)

    def refuse(self, request: QueuedRequest, error: frame_pb2.TaskError) -> None:
        """Return to its gateway a request that was not added here."""
        request.final = frame_pb2.Final(end=frame_pb2.TASK_END_RETURNED, error=error)
        self._outbox.publish(request, final_frame(request))

    def cancel(self, requests: Iterable[frame_pb2.TaskRef], now: float) -> None:
        """Cancel requests that nobody waits for, up to the attempts that the references name."""
        for ref in requests:
            request = self.requests.get(ref.request_id)
            if request is not None and request.attempt <= ref.attempt:
                if request.state < RequestState.ENDED:
                    request.final = frame_pb2.Final(end=frame_pb2.TASK_END_CANCELLED)
                self._close(request, now)

    def drop_gateway(self, gateway: str, now: float, *, waiting_only: bool = False) -> None:
        """Drop the requests of a gateway that is gone; with `waiting_only` those that no worker has."""
        for request in list(self.requests.values()):
            is_included = request.state is RequestState.WAITING or not waiting_only
            if request.task.gateway == gateway and is_included:
                self._close(request, now)

    def answer_query(self, progress: control_pb2.TaskProgress) -> bool:
        """Send a gateway what it misses of a request; return False if this attempt or a later one is not here."""
        request = self.requests.get(progress.request_id)
        if request is None or request.attempt < progress.attempt:
            return False
        self._outbox.resend(request, progress.next_index)
        self._outbox.acknowledge(request)
        return True

    # Workers.

    def on_report(self, worker: str, report: worker_pb2.StepReport, now: float) -> None:
        """Handle a report of a worker.

        Raises:
            ChannelBroken: an earlier report or frame is missing, or the worker has restarted; the channel must be
                opened again.
        """
        state = self.workers.states[worker]
        # Admissions first: frames of a batch may come with the report that admits it.
        state.on_report(report)
        for admission in report.admissions:
            for admitted in state.unacknowledged.pop(admission.batch_id, ()):
                admitted.is_admitted = True
                if not admitted.is_acknowledged:
                    self._outbox.acknowledge(admitted)
            self._on_refusals(state, admission, now)
        succeeded = failed = False
        for frame in report.frames:
            request = state.requests.get(frame.request_id)
            if request is None or request.attempt != frame.attempt:
                continue  # The request left this worker meanwhile.
            new = merge(request, frame)
            if new is None:
                continue  # These tokens came with the task, or were published before.
            if not new.HasField("final"):
                succeeded = True
                if new.token_ids and not request.answered:
                    self.queue.on_answered(request, now)
                self._outbox.publish(request, new)
            # The worker gave it back: only a real failure counts against the worker.
            elif new.final.end == frame_pb2.TASK_END_RETURNED:
                failed |= new.final.return_cause != _NOT_ACCEPTED
                if new.token_ids:
                    self._outbox.publish(request, part_of(new, final=False))
                cause = new.final.return_cause or frame_pb2.RETURN_CAUSE_WORKER_LOST
                self._return_to_gateway(request, now, cause, new.final.error, stop=False)
            else:
                succeeded |= bool(new.token_ids or new.final.values)
                self._end(request, new.final, now, new)
        if succeeded or failed:
            self.workers.record_outcome(worker, now, succeeded=succeeded, failed=failed)

    def on_lost(self, worker: str, now: float) -> None:
        """Return the requests of a lost worker to their gateways."""
        state = self.workers.states.pop(worker, None)
        if state is None or not state.requests:
            return
        self.workers.record_outcome(worker, now, succeeded=False, failed=True)
        for request in list(state.requests.values()):
            # A request on its last try counts as the cause only once the worker has admitted it:
            # before that, nobody knows that it was tried alone.
            blamed = not request.task.last_try or request.is_admitted
            cause = frame_pb2.RETURN_CAUSE_WORKER_LOST if blamed else _NOT_ACCEPTED
            self._return_to_gateway(request, now, cause, _LOST)

    def _on_refusals(self, state: WorkerState, admission: worker_pb2.Admission, now: float) -> None:
        for refusal in admission.refused:
            state.refuses |= refusal.retryable
            request = state.requests.get(refusal.request_id)
            batch = None if request is None else request.batch
            if request is None or batch is None or batch.batch_id != admission.batch_id:
                continue  # It left this worker, or was sent to it again in a later batch.
            if refusal.retryable:
                self._return_to_gateway(request, now, _NOT_ACCEPTED, refusal.error)
            else:
                end = frame_pb2.Final(end=frame_pb2.TASK_END_REFUSED, error=refusal.error)
                self._end(request, end, now)

    # Time.

    def advance(self, now: float) -> float:
        """End overdue requests, forget long ended ones, and form batches for the live workers.

        Returns:
            When to call again if no event comes before.
        """
        wake_at = math.inf
        # Overdue requests leave first, so that no batch is formed of them.
        self._end_overdue(now)
        while self._ended and (self._ended[0][0] <= now or len(self._ended) > ENDED_MAX):
            request = self._ended.popleft()[1]
            # Break the reference cycle, so that no garbage collection is needed.
            request.batch = None
            if request.state is RequestState.ENDED:
                self._close(request, now)
        active = self.workers.active()
        if self.queue.order.waiting or self._has_demand:
            wake_at = self._form_batches(active, now)
            for request in self._actions.added:
                if request.state is RequestState.WAITING:
                    request.is_acknowledged = True
                    self._outbox.acknowledge(request)
            waiting = [members.waiting for members in self.queue.order.classes.values()]
            self._actions.waiting = waiting
            # A batch carries the demand of its batcher; only other workers need a message.
            informed = {batch.worker for batch in self._actions.batches}
            self._actions.demands += self.workers.demand_changes(waiting, active, informed, now)
            self._has_demand = any(waiting)
        has_capacity = any(state.has_capacity for state in active.values())
        self.queue.waits.watch(now, has_capacity=has_capacity)
        if self._deadlines:
            wake_at = min(wake_at, self._deadlines[0][0])
        if self._ended:
            # Later than needed, so that requests which ended one after the other go together.
            wake_at = min(wake_at, self._ended[0][0] + ENDED_LATE_S)
        return wake_at

    def _end_overdue(self, now: float) -> None:
        """End requests whose deadline has passed, and drop deadlines of requests that are gone."""
        deadlines, requests = self._deadlines, self.requests
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1] not in requests):
            request = requests.get(heappop(deadlines)[1])
            if request is None or request.deadline > now:
                continue  # Gone, or sent again with a later deadline.
            if request.state < RequestState.ENDED:
                self._end(request, frame_pb2.Final(end=frame_pb2.TASK_END_DEADLINE), now)

    def _form_batches(self, active: Mapping[str, WorkerState], now: float) -> float:
        """Send requests to workers with capacity; return when to try again if no event comes before."""
        while self.queue.order.waiting:
            batch, wake_at = self.queue.next_batch(now, self.workers.capacities(active, now))
            if batch is None:
                return min(math.inf if wake_at is None else wake_at, self.workers.probe_at(now))
            self._send(cast("Batch[QueuedRequest]", batch))
        return math.inf

    # The end of the batcher.

    def drain(self, now: float, *, running: bool = False) -> None:
        """Return waiting requests to their gateways, now and from now on; with `running` those in workers too."""
        # Requests in workers stay until the drain time is over, unless `running` is set.
        self._draining = True
        last = RequestState.SENT if running else RequestState.WAITING
        for request in list(self.requests.values()):
            if request.state <= last:
                self._return_to_gateway(request, now)

    # State changes of requests.

    def _send(self, batch: Batch[QueuedRequest]) -> None:
        self._batches += 1
        worker = self.workers.states[batch.worker]
        batch.batch_id, batch.worker_id = f"{self._batcher}-{self._batches}", worker.worker_id
        for request in batch.entries:
            request.worker, request.state = batch.worker, RequestState.SENT
            # The request names no interval: the class and the load of the worker decide.
            if not request.task.HasField("coalesce_ms"):
                running = worker.load.running + len(batch.entries)
                delay_s = coalesce_s(request.priority_class, running)
                request.task.coalesce_ms = round(1000 * delay_s)
        worker.add_batch(batch.batch_id, batch.entries)
        self._actions.batches.append(batch)

    def _end(
        self,
        request: QueuedRequest,
        final: frame_pb2.Final,
        now: float,
        frame: frame_pb2.Frame | None = None,
    ) -> None:
        """End a request; `frame` is the worker's final frame, if the worker ended it."""
        decode_s = final.timings.decode_ms / 1e3
        self._remove(request, now, stop=frame is None, whole=final.end in _WHOLE, decode_s=decode_s)
        request.state = RequestState.ENDED
        request.end(final, now)
        self._outbox.publish(request, frame or final_frame(request))
        self._ended.append((now + ENDED_S, request))

    def _return_to_gateway(
        self,
        request: QueuedRequest,
        now: float,
        cause: "frame_pb2.ReturnCause.ValueType" = frame_pb2.RETURN_CAUSE_UNSPECIFIED,
        error: frame_pb2.TaskError | None = None,
        *,
        stop: bool = True,
    ) -> None:
        """Return a request to its gateway, which sends it again."""
        end = frame_pb2.TASK_END_RETURNED
        request.final = frame_pb2.Final(end=end, return_cause=cause, error=error)
        self._outbox.publish(request, final_frame(request))
        self._close(request, now, stop=stop)

    def _close(self, request: QueuedRequest, now: float, *, stop: bool = True) -> None:
        """Forget a request without a message to its gateway; with `stop` its worker is told to drop it."""
        if request.state < RequestState.ENDED:
            self._remove(request, now, stop=stop)
        request.state = RequestState.CLOSED
        del self.requests[request.request_id]
        self._outbox.forget(request)

    def _remove(
        self,
        request: QueuedRequest,
        now: float,
        *,
        stop: bool,
        whole: bool = False,
        decode_s: float = 0.0,
    ) -> None:
        """Remove a request from queue and worker; with `stop` the worker is told to drop it."""
        self.active -= 1
        self.size -= request.size
        self._actions.ended.append(request)
        if request.state is RequestState.WAITING:
            self.queue.cancel(request)
            return
        if self.workers.left_worker(request) and stop:
            self._actions.cancels.setdefault(request.worker, []).append(request.ref)
        tokens = len(request.produced)
        self.queue.finish(request, tokens, now, whole=whole, decode_s=decode_s)
