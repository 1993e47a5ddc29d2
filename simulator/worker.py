"""A simulated worker: batches in flight, the steps of its engine, and the batcher's view of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from batcher.core.scheduler.capacity import Capacity, UsableCapacity
from model_workers.engine.protocol import SequenceSpec
from model_workers.grants import NO_CAPACITY, ClassCapacity, class_capacities
from simulator.cores import Alarm, Cores, EventQueue
from simulator.engines import SimulatedEngine, StepProgress, Stretch
from simulator.results import History


@dataclass(eq=False)
class SimulatedWorker:
    """An engine and the time that its steps take.

    Attributes:
        name: its name.
        engine: computes the steps.
        history: gets the time that it computes.
        send_s: delay between batcher and worker, in seconds.
        events: virtual time.
        cores: cores that the engine shares; None: it has its own.
        on_admitted: called with the refused requests when a batch is acknowledged.
        on_progress: called when steps are done and their frames were sent.
    """

    name: str
    engine: SimulatedEngine
    history: History
    send_s: float
    events: EventQueue
    cores: Cores | None
    on_admitted: Callable[[Sequence[str]], None]
    on_progress: "Callable[[SimulatedWorker, StepProgress], None]"

    def __post_init__(self) -> None:
        self._stretch: Stretch | None = None
        self._started_at = 0.0
        self._steps = 0
        """Steps of the stretch until a sequence joins or leaves."""
        self._end = Alarm(self.events, self._finish)
        self._leaving: list[str] = []
        self._arrived: list[Sequence[SequenceSpec]] = []
        self._sent: dict[str, str] = {}
        """Batches of the requests that the batcher counts as here."""
        self._in_flight: dict[str, tuple[SequenceSpec, int]] = {}
        """Requests on their way here, with the KV cache tokens reserved for each."""
        self._unanswered = 0
        self._unsent: list[StepProgress] = []
        self._sends = False
        """Whether a report is on its way over the shared cores."""

    def capacity(self) -> Capacity:
        """Return what the batcher knows: the worker's last report, and what it sent since."""
        load = self.engine.load()
        in_flight = self._in_flight.values()
        reserved = sum(tokens for spec, tokens in in_flight if spec.request_id in self._sent)
        # Requests that have left are in no report, but the batcher does not know that yet.
        late = max(0, len(self._sent) - load.running - load.waiting - len(in_flight))
        prefill = sum(len(sequence.prompt) for sequence, _ in in_flight)

        def left(granted: ClassCapacity, waiting_tokens: int) -> UsableCapacity:
            slots = max(0, granted.tasks - len(in_flight) - late)
            return UsableCapacity(slots, granted.tokens - reserved, waiting_tokens + prefill)

        *urgent, last = NO_CAPACITY if load.batch_running else class_capacities(load)
        waiting = accumulate(rank.waiting_tokens for rank in load.classes)
        return Capacity(
            self.name,
            *left(last, load.waiting_tokens),
            running=load.running + load.waiting,
            batches_in_flight=self._unanswered,
            batches_running=len(set(self._sent.values())),
            urgent=list(map(left, urgent, waiting)),
        )

    def send(self, sequences: Sequence[SequenceSpec], cache_tokens: Sequence[int]) -> None:
        """Send a batch to the worker."""
        self._unanswered += 1
        for sequence, tokens in zip(sequences, cache_tokens, strict=True):
            self._in_flight[sequence.request_id] = sequence, tokens
            self._sent[sequence.request_id] = sequence.batch
        self.events.after(self.send_s, partial(self._receive, sequences))

    def drop(self, request_id: str) -> None:
        """Drop a request after the current step; the batcher knows at once that it is no longer here."""
        self._leaving.append(request_id)
        self.forget(request_id)
        self._cut_short()

    def forget(self, request_id: str) -> None:
        """Record that the batcher knows that the request is no longer here."""
        self._sent.pop(request_id, None)

    def account(self) -> None:
        """Count the time of steps that still run when the simulation ends."""
        if self._stretch is not None:
            self._count_time(self.events.now - self._started_at)

    def _receive(self, sequences: Sequence[SequenceSpec]) -> None:
        """Accept new sequences between two steps."""
        self._arrived.append(sequences)
        self._cut_short()
        if self._stretch is None:
            self._start()

    def _answer(self, refused: Sequence[str]) -> None:
        self._unanswered -= 1
        for request_id in refused:
            self.forget(request_id)
        self.on_admitted(refused)

    def _start(self) -> None:
        for request_id in self._leaving:
            self.engine.cancel(request_id)
        self._leaving.clear()
        for sequences in self._arrived:
            for sequence in sequences:
                del self._in_flight[sequence.request_id]
            refused = self.engine.admit(sequences)
            self.events.after(self.send_s, partial(self._answer, refused))
        self._arrived.clear()
        self._started_at = self.events.now
        self._stretch = self.engine.stretch(self._started_at)
        if self._stretch is None:
            return
        self._steps = self._stretch.steps if self.cores is None else 1
        seconds = self._stretch.seconds(self._steps)
        if self.cores is None:
            self._end.set(self._started_at + seconds)
        else:  # A part of the step is computed on the shared cores.
            share = self.cores.sharing.step_share
            computed = partial(self.cores.work, share * seconds, self._finish)
            self.events.after((1 - share) * seconds, computed)

    def _cut_short(self) -> None:
        """End the stretch after the current step, because a sequence waits to join or to leave."""
        if self._stretch is None or self.cores is not None:
            return  # Idle, or on shared cores, where stretches have a single step.
        self._steps = self._stretch.steps_within(self.events.now - self._started_at)
        self._end.set(self._started_at + self._stretch.seconds(self._steps))

    def _finish(self) -> None:
        self._count_time(self.events.now - self._started_at)
        progress = self.engine.advance(self._steps)
        self._stretch = None
        if self.cores is None:
            self.on_progress(self, progress)
        elif progress.first or progress.ended or progress.streamed:
            self._unsent.append(progress)
            self._send_report(self.cores)
        self._start()

    def _send_report(self, cores: Cores) -> None:
        """Send the frames of all finished steps, once the last report has arrived."""
        # One report at a time: steps that end meanwhile share the next one.
        if self._unsent and not self._sends:
            self._sends = True
            sent, self._unsent = self._unsent, []
            streamed = sum(progress.streamed for progress in sent)
            seconds = cores.sharing.report_s + cores.sharing.token_s * streamed
            cores.work(seconds, lambda: self._arrived_at_callers(sent, cores))

    def _arrived_at_callers(self, sent: Sequence[StepProgress], cores: Cores) -> None:
        self._sends = False
        for progress in sent:
            self.on_progress(self, progress)
        self._send_report(cores)

    def _count_time(self, seconds: float) -> None:
        self.history.busy_s += seconds
        self.history.slot_s += seconds * self.engine.load().running
