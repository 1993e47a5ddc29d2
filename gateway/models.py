"""Which models can answer now, as the batchers report it."""

from dataclasses import dataclass
from typing import Final

from sluice.internal.v1.control_pb2 import BatcherReport, ModelReport

EXPIRY_S: Final = 3.5
"""A batcher that was silent for this long is forgotten, seconds."""


@dataclass(frozen=True)
class Load:
    """State of one model over all batchers."""

    workers: int = 0
    slots: int = 0
    running: int = 0
    queued: int = 0

    @property
    def ready(self) -> bool:
        """Whether somebody can answer."""
        return self.workers > 0


@dataclass(frozen=True)
class _Entry:
    report: BatcherReport
    expires_at: float


class Directory:
    """The last report of every batcher."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def take(self, report: BatcherReport, now: float) -> None:
        """Replaces what the batcher said before."""
        if report.leaving:
            self._entries.pop(report.batcher, None)
        else:
            self._entries[report.batcher] = _Entry(report, now + EXPIRY_S)

    def expire(self, now: float) -> None:
        """Forgets batchers that were silent for too long."""
        for batcher in [b for b, entry in self._entries.items() if entry.expires_at <= now]:
            del self._entries[batcher]

    def load(self, model: str, now: float) -> Load:
        """State of ``model``. Batchers share the workers, so only what waits in each of them adds up."""
        reports = self._reports(model, now)
        return Load(
            workers=max((r.workers for r in reports), default=0),
            slots=max((r.slots for r in reports), default=0),
            running=max((r.running for r in reports), default=0),
            queued=sum(r.queued for r in reports),
        )

    def _reports(self, model: str, now: float) -> list[ModelReport]:
        return [
            report
            for entry in self._entries.values()
            if entry.expires_at > now
            for report in entry.report.models
            if report.model == model
        ]
