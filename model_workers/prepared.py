"""Compiles constraints beside the engine's thread; all other sequences go on meanwhile.

Compiling takes up to seconds (gateways have refused what takes longer), and so does reading the tokens of a sequence
that continues here. llguidance releases the interpreter's lock for both.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from model_workers.engine.protocol import Engine, SequenceEnd, SequenceSpec, SequenceStep
from sluice.errors import InvalidRequest, Overloaded, SluiceError
from sluice.internal.v1.worker_pb2 import WorkerLoad

if TYPE_CHECKING:  # a worker of the echo engine needs no torch
    from model_workers.constraints import TokenMatcher
    from model_workers.engine.sampling.sampler import Sampler

THREADS: Final = 2
"""Threads that compile: one slow grammar does not delay the next one."""
COMPILING_MAX: Final = 64
"""Sequences whose constraints may compile or wait for it; further ones are refused and go to another worker."""


@dataclass
class _Compiling:
    """A sequence that is not in the engine yet."""

    sequence: SequenceSpec
    arrived_at: float
    matcher: "Future[TokenMatcher]"
    cancelled: bool = False


class PreparedEngine(Engine):
    """Wraps an engine: a sequence with a constraint joins it when the constraint is compiled.

    Args:
        wake: Called from any thread when a sequence is ready.
        compiling_max: See `COMPILING_MAX`.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: "Sampler",
        wake: Callable[[], None],
        compiling_max: int = COMPILING_MAX,
    ) -> None:
        self._engine = engine
        self._wake = wake
        self._sampler = sampler
        self._compiling_max = compiling_max
        self._threads = ThreadPoolExecutor(THREADS, "constraints")
        self._compiling: dict[str, _Compiling] = {}

    @override
    def add(self, sequence: SequenceSpec, now: float) -> None:
        if not sequence.sampling.constrained:
            self._engine.add(sequence, now)
            return
        older = self._compiling.get(sequence.request_id)
        if older is not None and older.sequence.attempt >= sequence.attempt:
            raise InvalidRequest(
                f"attempt {older.sequence.attempt} of this request is here already"
            )
        if older is None and len(self._compiling) >= self._compiling_max:
            raise Overloaded(f"{self._compiling_max} constraints are being compiled; retry later")
        matcher = self._threads.submit(self._sampler.matcher, sequence)
        self._compiling[sequence.request_id] = _Compiling(sequence, now, matcher)
        matcher.add_done_callback(lambda _: self._wake())

    @override
    def cancel(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if request_id in self._compiling:
                self._compiling[request_id].cancelled = True
        self._engine.cancel(request_ids)

    @override
    def step(self, now: float) -> list[SequenceStep]:
        ends = [end for item in self._ready() if (end := self._join(item, now)) is not None]
        return [*ends, *(self._engine.step(now) if self._engine.has_sequences() else ())]

    @override
    def abort(self, message: str) -> list[SequenceStep]:
        compiling, self._compiling = list(self._compiling.values()), {}
        ends = [item.sequence.ended(SequenceEnd.RETURNED, message) for item in compiling]
        return [*ends, *self._engine.abort(message)]

    @override
    def has_sequences(self) -> bool:
        # A sequence whose constraint still compiles gives a step nothing to do.
        return self._engine.has_sequences() or bool(self._ready())

    @override
    def load(self) -> WorkerLoad:
        load = self._engine.load()
        load.waiting += len(self._compiling)
        return load

    def _ready(self) -> list[_Compiling]:
        return [item for item in self._compiling.values() if item.cancelled or item.matcher.done()]

    def _join(self, item: _Compiling, now: float) -> SequenceStep | None:
        """Add a sequence to the engine; return its last step if it cannot join."""
        sequence = item.sequence
        del self._compiling[sequence.request_id]
        try:
            if item.cancelled:
                return sequence.ended(SequenceEnd.CANCELLED)
            if sequence.deadline is not None and now >= sequence.deadline:
                return sequence.ended(SequenceEnd.DEADLINE)
            self._sampler.prepared[sequence.request_id] = item.matcher.result()
            self._engine.add(sequence, item.arrived_at)
        except SluiceError as error:
            return sequence.refused(error)
        finally:
            self._sampler.prepared.clear()
        return None
