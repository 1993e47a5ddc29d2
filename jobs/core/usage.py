"""How busy the workers were while a job ran, and how much of its batches would have been padding.

Both are of all that the mesh computed with the models of the job in that time, other requests included. Counters of
the mesh are read every now and then; where one falls, its process was started again, and what it did in between is
left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.internal.v1.job_pb2 import MeshUse


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of a counter; ``whose`` names the counter and its process."""

    whose: tuple[str, ...]
    value: float


class UseMeter:
    """Adds what has grown between two readings to a `MeshUse`."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, ...], float] = {}
        self._at: float | None = None
        self._workers = 0

    def told(
        self,
        use: MeshUse,
        now: float,
        workers: int,
        steps: Iterable[Reading],
        tokens: Iterable[Reading],
        padding: Iterable[Reading],
    ) -> None:
        """The counters at ``now``: seconds in steps of each worker, tokens of batches and padding of each batcher."""
        first = self._at is None
        grown = [sum(map(self._grown, each)) for each in (steps, tokens, padding)]
        if self._at is not None and not first:
            use.worker_s += (now - self._at) * self._workers
            use.busy_s += min(grown[0], (now - self._at) * self._workers)
            use.batch_tokens += round(grown[1])
            use.padding_tokens += round(grown[2])
        self._at, self._workers = now, workers

    def _grown(self, reading: Reading) -> float:
        before = self._before.get(reading.whose, reading.value if self._at is None else 0.0)
        self._before[reading.whose] = reading.value
        return max(0.0, reading.value - before)


def shares(use: MeshUse) -> tuple[float | None, float | None]:
    """The share of the time that workers were busy, and that of padding; None: not known."""
    cells = use.batch_tokens + use.padding_tokens
    busy = use.busy_s / use.worker_s if use.worker_s else None
    return busy, use.padding_tokens / cells if cells else None
