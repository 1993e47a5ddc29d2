"""Which versions of models requests may still send tasks to, after a reload has replaced or removed some."""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.admission.load_table import ModelLoadTable
from gateway.models.catalog import Catalog, ServedModel
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.row_result import RowResult

PREPARE_S: Final = 10.0
"""How long a request may be prepared before it has a stream, seconds."""


class ServedModels:
    """Replaces the models of a gateway.

    Args:
        streams: the live ones. One that is older than a reload may still send tasks to the models of before.
        rows: theirs; also of an answer that began at another gateway, with a version that was replaced since.
    """

    def __init__(
        self, catalog: Catalog, loads: ModelLoadTable, streams: Iterable[RowResult], rows: Dispatch
    ) -> None:
        self._catalog = catalog
        self._loads = loads
        self._streams = streams
        self._rows = rows
        self._reloaded = False
        self._replaced: dict[str, float] = {}
        """When, by task name."""
        self._tell_names()

    def use(self, models: Mapping[str, ServedModel], default: str) -> None:
        """Requests from now on get ``models``."""
        before, now = self._current(), time.monotonic()
        self._catalog.use(models, default)
        self._reloaded = True
        self._replaced |= dict.fromkeys(before, now)
        for name in self._current():
            self._replaced.pop(name, None)
        self._tell_names()

    def in_use(self, now: float) -> set[str]:
        """The task names of all versions that requests may send tasks to."""
        if self._replaced:
            oldest = min((one.spec.timings.arrived_at for one in self._streams), default=now)
            self._replaced = {
                name: at
                for name, at in self._replaced.items()
                if oldest <= at or now < at + PREPARE_S
            }
        rows = self._rows.task_names if self._reloaded else ()
        return {*self._current(), *self._replaced, *rows}

    def _current(self) -> list[str]:
        return [model.settings.task_name for model in self._catalog.served.values()]

    def _tell_names(self) -> None:
        served = self._catalog.served.items()
        self._loads.use({name: model.settings.task_name for name, model in served})
