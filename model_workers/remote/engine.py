"""The engine whose sequences are requests to an upstream server; see `Engine`.

The requests run in an event loop. They and the worker's thread meet in a queue of events: a request adds one for its
tokens and its end, and wakes the worker, whose next step reports them. So the engine has sequences, in the sense of
`Engine.has_sequences`, only while something is to be reported.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

from typing_extensions import override

from model_workers.engine.protocol import (
    Engine,
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
    TokenLogprobs,
)
from model_workers.engine.sequences import SequenceLimits, check_sequence
from model_workers.remote.api import ServerUsage
from model_workers.remote.client import ServerClient
from model_workers.remote.faults import Retry, ServerFault
from sluice.internal.v1.worker_pb2 import WorkerLoad

logger = logging.getLogger(__name__)

PACE_S: Final = 0.002
"""Minimum interval of steps with events, in seconds; what arrives meanwhile shares messages."""


@dataclass(eq=False)
class RemoteSequence:
    """A sequence and its request.

    Attributes:
        next_index: Index of the next answer token to report.
        begun: Whether the server has sent tokens.
        ended: Whether the end was reported.
    """

    spec: SequenceSpec
    next_index: int
    begun: bool = False
    ended: bool = False
    request: "Future[None] | None" = None

    def report(self, event: SequenceStep) -> SequenceStep:
        """Place an event after what was reported before."""
        event.start_index, self.next_index = self.next_index, self.next_index + len(event.token_ids)
        self.ended = event.end is not None
        event.delay_s = self.spec.delay_s(event.start_index, event.end)
        return event

    def answered(self, end: SequenceEnd, usage: ServerUsage | None) -> SequenceStep:
        """Return the last step, with what was billed; for a sequence that was begun elsewhere, that is not known."""
        step = self.spec.ended(end)
        if usage is None:
            return step
        billed = None if self.spec.produced else (usage.prompt_tokens, usage.answer_tokens)
        return replace(step, cached_prompt_tokens=usage.cached_tokens, server_tokens=billed)


def joined(first: SequenceStep, second: SequenceStep) -> SequenceStep:
    """Join two events of a sequence; what follows its end is dropped."""
    if first.end is not None:
        return first
    second.token_ids = first.token_ids + second.token_ids
    second.logprobs = first.logprobs + second.logprobs
    return second


@dataclass
class RemoteEngine(Engine):
    """An engine of requests to a server; see `Engine`.

    Attributes:
        limits: How many requests the server gets at the same time, and how many sequences may wait.
        alone: Whether no other worker could continue a sequence that fails here.
        wake: Wakes the worker, because there is something to report.
    """

    client: ServerClient
    limits: SequenceLimits
    alone: bool
    loop: asyncio.AbstractEventLoop
    wake: Callable[[], None]
    _sequences: dict[str, RemoteSequence] = field(default_factory=dict)
    _events: deque[tuple[RemoteSequence, SequenceStep] | None] = field(default_factory=deque)
    _steps: int = 0
    _is_waking: bool = False
    _wakes_at: float = 0.0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.limits.slots)

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        replaced = self._sequences.get(sequence.request_id)
        older = None if replaced is None else replaced.spec.attempt
        check_sequence(sequence, older, len(self._sequences), self.limits)
        if replaced is not None:
            replaced.ended = True
            self._stop(replaced)
        added = self._sequences[sequence.request_id] = RemoteSequence(
            sequence, len(sequence.produced)
        )
        added.request = asyncio.run_coroutine_threadsafe(self._answer(added), self.loop)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Cancel sequences and close their requests at once; see `Engine.cancel`."""
        for sequence in filter(None, map(self._sequences.get, request_ids)):
            self._stop(sequence)
            self._events.append((sequence, sequence.spec.ended(SequenceEnd.CANCELLED)))

    def step(self, now: float) -> list[SequenceStep]:
        """Report what has happened since the last step; see `Engine.step`."""
        self._steps += 1
        events: dict[RemoteSequence, SequenceStep] = {}
        for _ in range(len(self._events)):
            if (entry := self._events.popleft()) is not None:
                sequence, event = entry
                events[sequence] = joined(events[sequence], event) if sequence in events else event
        steps = [sequence.report(event) for sequence, event in events.items() if not sequence.ended]
        for step in steps:
            if step.end is not None:
                del self._sequences[step.request_id]
        return steps

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        sequences = list(self._sequences.values())
        self._sequences.clear()
        for sequence in sequences:
            self._stop(sequence)
        return [
            sequence.report(sequence.spec.ended(SequenceEnd.RETURNED, message))
            for sequence in sequences
        ]

    def has_sequences(self) -> bool:
        """Return whether there is something to report."""
        return bool(self._events)

    def load(self) -> WorkerLoad:
        """Return the load: full if the server accepts nothing now. See `Engine.load`."""
        slots, sequences = self.limits.slots, len(self._sequences)
        closed_s = max(0.0, self.client.gate.open_at - time.monotonic())
        running = slots if closed_s else min(sequences, slots)
        return WorkerLoad(
            slots=slots,
            running=running,
            waiting=max(0, sequences - slots),
            context_tokens=self.limits.context_tokens,
            steps=self._steps,
            paused_ms=closed_s * 1e3,
            server_unreachable=bool(self.client.health.problem),
        )

    def gate_changed(self) -> None:
        """Report that the server accepts requests again, or none for now. Call it in the event loop."""
        self._add_event()

    def _stop(self, sequence: RemoteSequence) -> None:
        if sequence.request is not None:
            sequence.request.cancel()

    async def _answer(self, sequence: RemoteSequence) -> None:
        spec = sequence.spec

        def emit(token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
            sequence.begun = True
            self._add_event(
                sequence,
                SequenceStep(spec.request_id, spec.owner, spec.attempt, 0, token_ids, logprobs),
            )

        try:
            async with asyncio.timeout_at(spec.deadline), self._slots:
                result = await self.client.answer(spec, emit)
            self._add_event(sequence, sequence.answered(*result))
        except TimeoutError:
            self._add_event(sequence, spec.ended(SequenceEnd.DEADLINE))
        except ServerFault as fault:
            self._add_event(sequence, self._failed(sequence, fault))
        except Exception as error:
            # The task would end silently, and its sequence would hang.
            logger.exception("a request failed")
            failed = f"the worker failed: {type(error).__name__}"
            self._add_event(sequence, spec.ended(SequenceEnd.FAILED, failed))

    def _failed(self, sequence: RemoteSequence, fault: ServerFault) -> SequenceStep:
        """Return the last step of a failed sequence: RETURNED if a worker may continue it."""
        returned = fault.retry is not Retry.NEVER and (sequence.begun or not self.alone)
        end = SequenceEnd.RETURNED if returned else SequenceEnd.FAILED
        step = sequence.spec.ended(end, fault.message)
        return replace(step, reason=fault.kind.reason, retry_after_s=fault.retry_after_s or 0.0)

    def _add_event(
        self, sequence: RemoteSequence | None = None, step: SequenceStep | None = None
    ) -> None:
        """Add an event, and wake the worker `PACE_S` after the last time at the earliest; in the event loop."""
        self._events.append((sequence, step) if sequence and step else None)
        if not self._is_waking:
            self._is_waking = True
            self._wakes_at = max(self.loop.time(), self._wakes_at + PACE_S)
            self.loop.call_at(self._wakes_at, self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        self.wake()
