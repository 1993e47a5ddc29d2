"""The load of every model: workers, queues and expected waits, as the batchers report them."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.streaming.room import Room
from gateway.streaming.sent_row import Line
from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport

UNBOUNDED: Final = Room(math.inf, math.inf)
"""The room of a batcher of an older release, which does not say it."""
EXPIRY_S: Final = 3.5
"""A report older than this is not used any more."""


@dataclass(frozen=True)
class ClassLoad:
    """The load of one class of one model over all batchers."""

    queued: int = 0
    """Tasks that wait in batchers."""
    task_tokens: float = 0.0
    """Mean length of their prompts and expected answers; 0: not known."""
    wait_s: float = 0.0
    """Expected wait for a worker of a task that arrives with the report, of a tenant that has none waiting."""
    tenant_waits_s: Mapping[str, float] = field(default_factory=dict)
    """The same of tenants that have many."""
    service_s: float = 0.0
    """How long a worker takes for an answer; 0: not known."""


_NOTHING: Final = ClassLoad()


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
        return self.classes.get(priority_class, _NOTHING)


@dataclass
class _Batcher:
    """The last report of one batcher."""

    reported_at: float
    sequence: int
    models: Mapping[str, ModelReport]
    sent: Counter[str] = field(default_factory=Counter)
    """Tasks that this gateway has sent to it since, by model."""
    chosen: int = 0
    """The number of the last choice that it was."""


class ModelLoadTable:
    """The last report of every batcher. Models are called as in tasks."""

    def __init__(self) -> None:
        self._batchers: dict[str, _Batcher] = {}
        self._choices = 0
        self._loads: dict[str, ModelLoad] = {}
        """Computed since the reports changed; every request asks for several."""

    def update(self, report: BatcherReport, now: float) -> None:
        """Replaces the previous report of the batcher, unless that is newer."""
        known = self._batchers.get(report.batcher)
        if known is not None and report.sequence < known.sequence:
            return
        self._loads.clear()
        self._batchers.pop(report.batcher, None)
        if not report.leaving:
            models = {entry.model: entry for entry in report.models}
            chosen = 0 if known is None else known.chosen
            self._batchers[report.batcher] = _Batcher(now, report.sequence, models, chosen=chosen)

    def expire(self, now: float) -> None:
        """Removes batchers that have been silent for `EXPIRY_S`."""
        silent = [
            name
            for name, batcher in self._batchers.items()
            if batcher.reported_at + EXPIRY_S <= now
        ]
        for name in silent:
            del self._batchers[name]
        if silent:
            self._loads.clear()

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        """The batcher for the next task of ``model``: with a worker, where the fewest tasks wait.

        Among equals it is the one that was chosen longest ago. None: there is none but ``without``.
        """
        found: list[tuple[int, int, str]] = []
        for name, batcher in self._batchers.items():
            entry = batcher.models.get(model)
            if entry is None or not entry.workers or name in without:
                continue
            if batcher.reported_at + EXPIRY_S > now:
                found.append((entry.queued + batcher.sent[model], batcher.chosen, name))
        if not found:
            return None
        chosen = self._batchers[min(found)[2]]
        self._choices += 1
        chosen.sent[model] += 1
        chosen.chosen = self._choices
        return min(found)[2]

    def rooms(self, line: Line, now: float) -> dict[str, Room]:
        """What each batcher with a worker of the model grants this gateway for rows of the class."""
        found: dict[str, Room] = {}
        for name, batcher in self._batchers.items():
            entry = batcher.models.get(line.model)
            if entry is None or not entry.workers or batcher.reported_at + EXPIRY_S <= now:
                continue
            found[name] = next(
                (
                    Room(one.room_rows, one.room_bytes)
                    for one in entry.classes
                    if one.priority_class == line.priority_class and one.HasField("room_rows")
                ),
                UNBOUNDED,
            )
        return found

    def load(self, model: str, now: float) -> ModelLoad:
        """The load of ``model``. Batchers share the workers: only their queues and their speeds add up."""
        load = self._loads.get(model)
        if load is None or load.reported_at + EXPIRY_S <= now:
            self.expire(now)
            load = self._loads[model] = self._sum(model)
        return load

    def _sum(self, model: str) -> ModelLoad:
        found = [
            (batcher.reported_at, batcher.models[model])
            for batcher in self._batchers.values()
            if model in batcher.models
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
        queued=queued,
        task_tokens=tokens / queued if queued else 0.0,
        # A task may come to any of them.
        wait_s=sum(entry.expected_wait_ms for entry in entries) / len(entries) / 1e3,
        service_s=sum(served) / len(served) / 1e3 if served else 0.0,
        tenant_waits_s={
            tenant: sum(one.tenant_wait_ms.get(tenant, one.expected_wait_ms) for one in entries)
            / len(entries)
            / 1e3
            for tenant in {name for one in entries for name in one.tenant_wait_ms}
        },
    )
