"""The load of every model, as batchers report it.

A batcher reports how long a new task of each class would wait, how many would not wait at all, and how fast workers
are.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Final

from gateway.streaming.room import Line, Room
from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport

UNBOUNDED: Final = Room(math.inf, math.inf)
"""The room of a batcher of an older release, which does not say it."""
EXPIRY_S: Final = 3.5
"""A report older than this is not used any more."""


@dataclass(frozen=True)
class ClassLoad:
    """The load of one class of one model over all batchers."""

    task_tokens: float = 0.0
    """Mean length of their prompts and expected answers; 0: not known."""
    wait_s: float = 0.0
    """Expected wait for a worker of a task that arrives with the report, of a tenant that has none waiting."""
    tenant_waits_s: Mapping[str, float] = field(default_factory=dict)
    """The same of tenants that have many."""
    free_rows: int = 0
    """Tasks of the class that would not wait."""
    first_token_s: float = 0.0
    """Time in a worker until the first token, without the prompt; 0: not known."""
    prompt_token_s: float = 0.0
    """The same for each token of the prompt."""
    token_s: float = 0.0
    """Time for each further token of the answer."""


_NOTHING: Final = ClassLoad()


@dataclass(frozen=True)
class ModelLoad:
    """The load of one model over all batchers."""

    workers: int = 0
    slots: int = 0
    running: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    """Rate of the workers while all their capacity is used, prompts and answers; 0: it is not, or not known."""
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
        live = {
            name: one for name, one in self._batchers.items() if one.reported_at + EXPIRY_S > now
        }
        if len(live) < len(self._batchers):
            self._batchers = live
            self._loads.clear()

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        """The batcher for the next task of ``model``: with a worker, where the fewest tasks wait.

        Among equals it is the one that was chosen longest ago. None: there is none but ``without``.
        """
        found = [
            (entry.queued + batcher.sent[model], batcher.chosen, name)
            for name, batcher, entry in self._serving(model, now)
            if name not in without
        ]
        if not found:
            return None
        *_, name = min(found)
        self._choices += 1
        self._batchers[name].sent[model] += 1
        self._batchers[name].chosen = self._choices
        return name

    def rooms(self, line: Line, now: float) -> dict[str, Room]:
        """What each batcher with a worker of the model grants this gateway for rows of the class."""
        found = dict[str, Room]()
        for name, _, entry in self._serving(line.model, now):
            found[name] = UNBOUNDED
            for one in entry.classes:
                if one.priority_class == line.priority_class and one.HasField("room_rows"):
                    found[name] = Room(one.room_rows, one.room_bytes)
        return found

    def _serving(self, model: str, now: float) -> Iterator[tuple[str, _Batcher, ModelReport]]:
        """The batchers that have a worker of ``model``."""
        for name, batcher in self._batchers.items():
            entry = batcher.models.get(model)
            if entry is not None and entry.workers and batcher.reported_at + EXPIRY_S > now:
                yield name, batcher, entry

    def load(self, model: str, now: float) -> ModelLoad:
        """The load of ``model``. Batchers share the workers: only their queues and their speeds add up."""
        load = self._loads.get(model)
        if load is None or load.reported_at + EXPIRY_S <= now:
            self.expire(now)
            load = self._loads[model] = self._sum(model)
        return load

    def _sum(self, model: str) -> ModelLoad:
        found = [one for one in self._batchers.values() if model in one.models]
        if not found:
            return ModelLoad()
        reports = [one.models[model] for one in found]
        classes = defaultdict[str, list[ClassReport]](list)
        for entry in chain.from_iterable(one.classes for one in reports):
            classes[entry.priority_class].append(entry)
        return ModelLoad(
            workers=max(one.workers for one in reports),
            slots=max(one.slots for one in reports),
            running=max(one.running for one in reports),
            queued=sum(one.queued for one in reports),
            tokens_per_s=sum(one.tokens_per_s for one in reports),
            reported_at=min(one.reported_at for one in found),
            classes={name: _class_load(entries) for name, entries in classes.items()},
        )


def _class_load(entries: Sequence[ClassReport]) -> ClassLoad:
    queued = sum(one.queued for one in entries)
    # A batcher that knows no speed has measured none: its rows are few.
    measured = [one for one in entries if one.first_token_ms + one.prompt_token_ms > 0]

    def mean_s(values_ms: Iterable[float]) -> float:
        return fmean(values_ms) / 1e3 if measured else 0.0

    def wait_s(tenant: str) -> float:
        """A task may come to any of the batchers."""
        return fmean(one.tenant_wait_ms.get(tenant, one.expected_wait_ms) for one in entries) / 1e3

    return ClassLoad(
        task_tokens=sum(one.queued_tokens for one in entries) / queued if queued else 0.0,
        wait_s=fmean(one.expected_wait_ms for one in entries) / 1e3,
        tenant_waits_s={name: wait_s(name) for one in entries for name in one.tenant_wait_ms},
        free_rows=sum(one.free_rows for one in entries),
        first_token_s=mean_s(one.first_token_ms for one in measured),
        prompt_token_s=mean_s(one.prompt_token_ms for one in measured),
        token_s=mean_s(one.token_ms for one in measured),
    )
