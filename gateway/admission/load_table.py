"""Which models can answer now, and how soon, as the batchers report it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport

EXPIRY_S: Final = 3.5
"""A batcher that was silent for this long is forgotten, seconds."""


@dataclass(frozen=True)
class ClassLoad:
    """State of one class of one model over all batchers."""

    queued: int = 0
    """Tasks that wait, those that no batcher has taken included."""
    task_tokens: float = 0.0
    """Prompt and expected answer of one of them on average; 0: not known."""
    wait_s: float = 0.0
    """How long a task that came at the time of the report would wait for a worker."""
    service_s: float = 0.0
    """How long answers take with a worker; 0: not known."""


@dataclass(frozen=True)
class ModelLoad:
    """State of one model over all batchers."""

    workers: int = 0
    slots: int = 0
    running: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    """Tokens of waiting tasks that the workers get through; 0: not known."""
    reported_at: float = 0.0
    """When the oldest of the reports came."""
    classes: Mapping[str, ClassLoad] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether somebody can answer."""
        return self.workers > 0

    def of_class(self, priority_class: str) -> ClassLoad:
        """State of one class; without a word of it nothing waits."""
        return self.classes.get(priority_class, ClassLoad())


@dataclass(frozen=True)
class _Entry:
    report: BatcherReport
    came_at: float

    def live(self, now: float) -> bool:
        return self.came_at + EXPIRY_S > now


class ModelLoadTable:
    """The last report of every batcher."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def update(self, report: BatcherReport, now: float) -> None:
        """Replaces what the batcher said before."""
        if report.leaving:
            self._entries.pop(report.batcher, None)
        else:
            self._entries[report.batcher] = _Entry(report, now)

    def expire(self, now: float) -> None:
        """Forgets batchers that were silent for too long."""
        for batcher in [b for b, entry in self._entries.items() if not entry.live(now)]:
            del self._entries[batcher]

    def load(self, model: str, now: float) -> ModelLoad:
        """State of ``model``. Batchers share the workers: only what waits in each of them, and its speed, adds up."""
        found = [
            (entry.came_at, report)
            for entry in self._entries.values()
            if entry.live(now)
            for report in entry.report.models
            if report.model == model
        ]
        reports = [report for _, report in found]
        return ModelLoad(
            workers=max((r.workers for r in reports), default=0),
            slots=max((r.slots for r in reports), default=0),
            running=max((r.running for r in reports), default=0),
            queued=sum(r.queued for r in reports),
            tokens_per_s=sum(r.tokens_per_s for r in reports),
            reported_at=min((came_at for came_at, _ in found), default=0.0),
            classes=_classes(reports),
        )


def _classes(reports: Iterable[ModelReport]) -> dict[str, ClassLoad]:
    by_name: dict[str, list[ClassReport]] = {}
    for report in reports:
        for entry in report.classes:
            by_name.setdefault(entry.priority_class, []).append(entry)
    return {name: _class_load(entries) for name, entries in by_name.items()}


def _class_load(entries: Sequence[ClassReport]) -> ClassLoad:
    queued = sum(entry.queued for entry in entries)
    tokens = sum(entry.queued_tokens for entry in entries)
    served = [entry.service_ms for entry in entries if entry.service_ms]
    return ClassLoad(
        # What nobody has taken is the same for all of them.
        queued=queued + max(entry.backlog for entry in entries),
        task_tokens=tokens / queued if queued else 0.0,
        # A task may come to any of them.
        wait_s=sum(entry.expected_wait_ms for entry in entries) / len(entries) / 1e3,
        service_s=sum(served) / len(served) / 1e3 if served else 0.0,
    )
