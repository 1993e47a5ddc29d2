"""The load of every model: workers, queues and expected waits, as the batchers report them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport

EXPIRY_S: Final = 3.5
"""A report older than this is not used any more."""


@dataclass(frozen=True)
class ClassLoad:
    """The load of one class of one model over all batchers."""

    queued: int = 0
    """Tasks that wait, including those that no batcher has taken."""
    task_tokens: float = 0.0
    """Mean length of their prompts and expected answers; 0: not known."""
    wait_s: float = 0.0
    """Expected wait for a worker of a task that arrives at the time of the report."""
    service_s: float = 0.0
    """How long a worker takes for an answer; 0: not known."""


@dataclass(frozen=True)
class ModelLoad:
    """The load of one model over all batchers."""

    workers: int = 0
    slots: int = 0
    running: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    """Throughput of the workers in tokens of waiting tasks; 0: not known."""
    reported_at: float = 0.0
    """When the oldest of the reports arrived."""
    classes: Mapping[str, ClassLoad] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether a worker is alive."""
        return self.workers > 0

    def of_class(self, priority_class: str) -> ClassLoad:
        """The load of one class; nothing waits in a class that is not reported."""
        return self.classes.get(priority_class, ClassLoad())


class ModelLoadTable:
    """The last report of every batcher."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[BatcherReport, float]] = {}
        """With the time of arrival, by batcher."""
        self._loads: dict[str, ModelLoad] = {}
        """Computed since the reports changed; every request asks for several."""

    def update(self, report: BatcherReport, now: float) -> None:
        """Replaces the previous report of the batcher."""
        self._loads.clear()
        if report.leaving:
            self._reports.pop(report.batcher, None)
        else:
            self._reports[report.batcher] = report, now

    def expire(self, now: float) -> None:
        """Removes batchers that have been silent for `EXPIRY_S`."""
        silent = [name for name, (_, at) in self._reports.items() if at + EXPIRY_S <= now]
        for batcher in silent:
            del self._reports[batcher]
        if silent:
            self._loads.clear()

    def load(self, model: str, now: float) -> ModelLoad:
        """The load of ``model``. Batchers share the workers: only their queues and their speeds add up."""
        load = self._loads.get(model)
        if load is None or load.reported_at + EXPIRY_S <= now:
            self.expire(now)
            load = self._loads[model] = self._sum(model)
        return load

    def _sum(self, model: str) -> ModelLoad:
        found = [
            (at, entry)
            for report, at in self._reports.values()
            for entry in report.models
            if entry.model == model
        ]
        reports = [report for _, report in found]
        return ModelLoad(
            workers=max((r.workers for r in reports), default=0),
            slots=max((r.slots for r in reports), default=0),
            running=max((r.running for r in reports), default=0),
            queued=sum(r.queued for r in reports),
            tokens_per_s=sum(r.tokens_per_s for r in reports),
            reported_at=min((at for at, _ in found), default=0.0),
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
        # All batchers report the same backlog: the tasks that none of them has taken.
        queued=queued + max(entry.backlog for entry in entries),
        task_tokens=tokens / queued if queued else 0.0,
        # A task may come to any of them.
        wait_s=sum(entry.expected_wait_ms for entry in entries) / len(entries) / 1e3,
        service_s=sum(served) / len(served) / 1e3 if served else 0.0,
    )
