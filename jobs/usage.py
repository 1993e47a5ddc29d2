"""Reads how busy the workers are, through a gateway; what is made of it is in `jobs/core/usage.py`."""

import time
from collections.abc import Collection, Iterable
from typing import Any, Final

import grpc

from jobs.core.usage import Reading, UseMeter
from jobs.gateways import Gateways
from jobs.recent import Recent
from sluice.internal.v1.job_pb2 import MeshUse
from sluice.telemetry import catalog
from sluice.v1.admin_pb2 import (
    MetricPoint,
    ProcessMetrics,
    ReadMetricsRequest,
    ReadMetricsResponse,
)

READ_S: Final = 10.0
"""How often they are read."""
ANSWER_S: Final = 2.0
_NAMES: Final = tuple(
    one.name
    for one in (
        catalog.STEP_TIME,
        catalog.WORKER_LIVE,
        catalog.BATCH_TOKENS,
        catalog.PADDING_TOKENS,
    )
)


def metrics_of(gateways: Gateways) -> "Recent[ReadMetricsResponse]":
    """Those of workers and batchers, for all jobs of a process."""
    admin: Any = gateways.admin
    request = ReadMetricsRequest(names=_NAMES)

    async def read() -> ReadMetricsResponse:
        found: ReadMetricsResponse = await admin.ReadMetrics(
            request, timeout=ANSWER_S, metadata=gateways.metadata
        )
        return found

    return Recent(read)


class WorkerUse:
    """Of the workers of one job."""

    def __init__(self, metrics: "Recent[ReadMetricsResponse]", models: Collection[str]) -> None:
        """``models``: of the job; none: all. ``metrics``: see `metrics_of`."""
        self._metrics = metrics
        self._models = models
        self._meter = UseMeter()

    async def read(self, use: MeshUse, *, fresh: bool = False) -> None:
        """Adds what was done since the last time; nothing while no gateway answers. ``fresh``: up to now."""
        try:
            found = await self._metrics.get(fresh=fresh)
        except grpc.aio.AioRpcError:
            return
        live = {
            one.whose[1:]
            for one in self._workers(found.processes, catalog.WORKER_LIVE)
            if one.value
        }
        self._meter.told(
            use,
            time.monotonic(),
            len(live),
            self._workers(found.processes, catalog.STEP_TIME),
            self._batchers(found.processes, catalog.BATCH_TOKENS),
            self._batchers(found.processes, catalog.PADDING_TOKENS),
        )

    def _workers(
        self, processes: Iterable[ProcessMetrics], metric: catalog.Metric
    ) -> list[Reading]:
        """By worker: every batcher reports each, the highest value is the newest."""
        found: dict[tuple[str, ...], float] = {}
        for _, point in self._points(processes, metric):
            whose = (metric.name, *point.labels)
            found[whose] = max(point.value, found.get(whose, 0.0))
        return [Reading(*one) for one in found.items()]

    def _batchers(
        self, processes: Iterable[ProcessMetrics], metric: catalog.Metric
    ) -> list[Reading]:
        return [
            Reading((metric.name, instance, *point.labels), point.value)
            for instance, point in self._points(processes, metric)
        ]

    def _points(
        self, processes: Iterable[ProcessMetrics], metric: catalog.Metric
    ) -> list[tuple[str, MetricPoint]]:
        return [
            (process.instance, point)
            for process in processes
            for series in process.metrics
            if series.name == metric.name
            for point in series.points
            if not self._models or point.labels[0] in self._models
        ]
