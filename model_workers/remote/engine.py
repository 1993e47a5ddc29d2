"""The engine whose rows are requests to a server: see `Engine`.

The worker and the requests share an event loop, and meet in a queue of events: a request adds one for each of its
tokens and its end, and wakes the worker, whose next step reports them. So the engine "has rows" for its worker only
while something is to be reported.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from typing_extensions import override

from model_workers.engine.protocol import (
    Engine,
    EngineLoad,
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
    TokenLogprobs,
)
from model_workers.engine.sequences import SequenceLimits, check_sequence
from model_workers.remote.api import ServerUsage
from model_workers.remote.client import ServerClient
from model_workers.remote.faults import Retry, ServerFault

log = logging.getLogger(__name__)

STEP_EVENTS_MAX: Final = 1024


@dataclass(eq=False)
class RemoteSequence:
    """A row and its request.

    Attributes:
        next_index: of the next token of the answer that is reported.
        begun: the server has sent tokens.
        ended: nothing more is reported of it.
    """

    spec: SequenceSpec
    next_index: int
    begun: bool = False
    ended: bool = False
    task: "asyncio.Task[None] | None" = None

    def report(self, event: SequenceStep) -> SequenceStep:
        """Place ``event`` behind what was reported before."""
        event.start_index, self.next_index = self.next_index, self.next_index + len(event.token_ids)
        self.ended = event.end is not None
        event.delay_s = self.spec.delay_s(event.start_index, event.end)
        return event

    def answered(self, end: SequenceEnd, usage: ServerUsage | None) -> SequenceStep:
        """Its end, with what was billed; of a row that was begun before, nobody knows what was billed then."""
        step = self.spec.ended(end)
        if usage is None:
            return step
        billed = None if self.spec.produced else (usage.prompt_tokens, usage.answer_tokens)
        return replace(step, cached_prompt_tokens=usage.cached_tokens, server_tokens=billed)


def joined(first: SequenceStep, second: SequenceStep) -> SequenceStep:
    """Return two events of a row as one; what follows its end is dropped."""
    if first.end is not None:
        return first
    second.token_ids = first.token_ids + second.token_ids
    second.logprobs = first.logprobs + second.logprobs
    return second


@dataclass
class RemoteEngine(Engine):
    """See `Engine`.

    Attributes:
        limits: how many requests the server gets at the same time, and how many rows may wait beside those.
        alone: no other worker could go on with a row that fails here.
        wake: tells the worker that there is something to report.
    """

    client: ServerClient
    limits: SequenceLimits
    alone: bool
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None] = lambda: None
    _rows: dict[str, RemoteSequence] = field(default_factory=dict)
    _events: deque[tuple[RemoteSequence, SequenceStep] | None] = field(default_factory=deque)
    _steps: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.limits.slots)

    @override
    def add(self, row: SequenceSpec, now: float) -> None:
        old = self._rows.get(row.request_id)
        older = None if old is None else old.spec.attempt
        check_sequence(row, older, len(self._rows), self.limits)
        if old is not None:
            old.ended = True
            self._stop(old)
        added = self._rows[row.request_id] = RemoteSequence(row, len(row.produced))
        added.task = self.loop.create_task(self._answer(added))

    def cancel(self, request_ids: Collection[str]) -> None:
        """See `Engine.cancel`; the request is closed at once."""
        for row in filter(None, map(self._rows.get, request_ids)):
            self._stop(row)
            self._events.append((row, row.spec.ended(SequenceEnd.CANCELLED)))

    def step(self, now: float) -> list[SequenceStep]:
        """See `Engine.step`: reports what has happened since the last one."""
        self._steps += 1
        events: dict[RemoteSequence, SequenceStep] = {}
        for row, event in filter(None, self._taken()):
            events[row] = joined(events[row], event) if row in events else event
        steps = [row.report(event) for row, event in events.items() if not row.ended]
        for step in steps:
            if step.end is not None:
                del self._rows[step.request_id]
        return steps

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        rows = list(self._rows.values())
        self._rows.clear()
        for row in rows:
            self._stop(row)
        return [row.report(row.spec.ended(SequenceEnd.RETURNED, message)) for row in rows]

    def has_sequences(self) -> bool:
        """Whether there is something to report."""
        return bool(self._events)

    def load(self) -> EngineLoad:
        """See `Engine.load`; an engine whose server takes nothing now is full."""
        slots, rows = self.limits.slots, len(self._rows)
        closed_s = max(0.0, self.client.gate.open_at - time.monotonic())
        running = slots if closed_s else min(rows, slots)
        return EngineLoad(
            slots=slots,
            running=running,
            waiting=max(0, rows - slots),
            context_tokens=self.limits.context_tokens,
            steps=self._steps,
            paused_ms=closed_s * 1e3,
            server_unreachable=bool(self.client.health.problem),
        )

    def _taken(self) -> Iterator[tuple[RemoteSequence, SequenceStep] | None]:
        for _ in range(min(len(self._events), STEP_EVENTS_MAX)):
            yield self._events.popleft()

    def gate_changed(self) -> None:
        """The server takes requests again, or no more for now: batchers are told."""
        self._tell()

    def _stop(self, row: RemoteSequence) -> None:
        if row.task is not None:
            row.task.cancel()

    async def _answer(self, row: RemoteSequence) -> None:
        spec = row.spec

        def emit(token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
            row.begun = True
            self._tell(
                row, SequenceStep(spec.request_id, spec.owner, spec.attempt, 0, token_ids, logprobs)
            )

        try:
            async with asyncio.timeout_at(spec.deadline), self._slots:
                answered = await self.client.answer(spec, emit)
            self._tell(row, row.answered(*answered))
        except TimeoutError:
            self._tell(row, spec.ended(SequenceEnd.DEADLINE))
        except ServerFault as fault:
            self._tell(row, self._failed(row, fault))
        except Exception as error:
            # The task would end silently, and its row would hang.
            log.exception("a request failed")
            failed = f"the worker failed: {type(error).__name__}"
            self._tell(row, spec.ended(SequenceEnd.FAILED, failed))

    def _failed(self, row: RemoteSequence, fault: ServerFault) -> SequenceStep:
        """A row that another worker, or this one later, may go on with is returned."""
        returned = fault.retry is not Retry.NEVER and (row.begun or not self.alone)
        end = SequenceEnd.RETURNED if returned else SequenceEnd.FAILED
        step = row.spec.ended(end, fault.message)
        return replace(step, reason=fault.kind.reason, retry_after_s=fault.retry_after_s or 0.0)

    def _tell(self, row: RemoteSequence | None = None, step: SequenceStep | None = None) -> None:
        """Add an event and wake the worker, which takes all of this pass of the loop together."""
        self._events.append((row, step) if row and step else None)
        self.wake()
