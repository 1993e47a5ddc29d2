"""Sequences with constraints wait until theirs is compiled, beside the engine's thread; all other sequences go on meanwhile.

Compiling takes up to seconds (gateways have refused what takes longer), and reading the tokens of a sequence that continues
takes long too. llguidance releases the interpreter's lock for both.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from model_workers.engine.protocol import (
    Engine,
    EngineFull,
    Refused,
    RowStale,
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
)
from sluice.internal.v1 import worker_pb2

if TYPE_CHECKING:  # a worker of the echo engine needs no torch
    from model_workers.constraints import TokenMatcher
    from model_workers.engine.sampling.sampler import Sampler

THREADS: Final = 2
OPENING_MAX: Final = 64
"""Sequences whose constraints may be compiled or wait for it; more are refused, and go to another worker."""


@dataclass
class _Opening:
    """A sequence that is not in the engine yet."""

    sequence: SequenceSpec
    arrived_at: float
    matcher: "Future[TokenMatcher]"
    cancelled: bool = False


class PreparedEngine(Engine):
    """See `Engine`. Sequences without constraints go to ``engine`` at once.

    Attributes:
        wake: called from any thread when there is something to do that no command told.
    """

    def __init__(self, engine: Engine, sampler: "Sampler") -> None:
        self._engine = engine
        self._sampler = sampler
        self._threads = ThreadPoolExecutor(THREADS, "constraints")
        self._opening: dict[str, _Opening] = {}
        self.wake: Callable[[], None] = lambda: None

    def add(self, sequence: SequenceSpec, now: float) -> None:
        """See `Engine.add`. What is wrong with a constraint ends its sequence later."""
        if not sequence.sampling.constrained:
            self._engine.add(sequence, now)
            return
        older = self._opening.get(sequence.request_id)
        if older is not None and older.sequence.attempt >= sequence.attempt:
            raise RowStale(f"attempt {older.sequence.attempt} of {sequence.request_id} is here")
        if older is None and len(self._opening) >= OPENING_MAX:
            raise EngineFull(f"the constraints of {OPENING_MAX} sequences are being compiled")
        matcher = self._threads.submit(self._sampler.matcher, sequence)
        self._opening[sequence.request_id] = _Opening(sequence, now, matcher)
        matcher.add_done_callback(lambda _: self.wake())

    @override
    def cancel(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if request_id in self._opening:
                self._opening[request_id].cancelled = True
        self._engine.cancel(request_ids)

    @override
    def step(self, now: float) -> list[SequenceStep]:
        ends = [end for one in self._ready() if (end := self._entered(one, now)) is not None]
        return [*ends, *(self._engine.step(now) if self._engine.has_sequences() else ())]

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        opening, self._opening = list(self._opening.values()), {}
        ends = [one.sequence.ended(SequenceEnd.RETURNED, message) for one in opening]
        return [*ends, *self._engine.abort(message)]

    def has_sequences(self) -> bool:
        """See `Engine.has_sequences`; sequences that are not ready are none."""
        return self._engine.has_sequences() or bool(self._ready())

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        load = self._engine.load()
        load.waiting += len(self._opening)
        return load

    def _ready(self) -> list[_Opening]:
        return [one for one in self._opening.values() if one.cancelled or one.matcher.done()]

    def _entered(self, one: _Opening, now: float) -> SequenceStep | None:
        """The sequence is in the engine; or how it ended."""
        sequence = one.sequence
        del self._opening[sequence.request_id]
        try:
            if one.cancelled:
                return sequence.ended(SequenceEnd.CANCELLED)
            if sequence.deadline is not None and now >= sequence.deadline:
                return sequence.ended(SequenceEnd.DEADLINE)
            self._sampler.prepared[sequence.request_id] = one.matcher.result()
            self._engine.add(sequence, one.arrived_at)
        except Refused as refused:
            end = SequenceEnd.RETURNED if refused.retryable else SequenceEnd.FAILED
            return sequence.ended(end, refused.message, refused.reason, field=refused.field)
        finally:
            self._sampler.prepared.clear()
        return None
