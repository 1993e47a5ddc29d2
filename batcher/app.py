"""The batcher process: start order, and backwards the drain."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from nats.aio.client import Client
from opentelemetry.trace import Tracer

from batcher.changes import check_change
from batcher.core.peers import Peers
from batcher.delivery import Delivery
from batcher.forsaken import Forsaken
from batcher.line import Line
from batcher.process import Process
from batcher.reports import Reporter
from batcher.spans import RowSpans
from sluice.internal.v1 import control_pb2
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.settings.reload import reloading
from sluice.wire.connection import connect, disconnect

log = logging.getLogger(__name__)

PING_INTERVAL_S: Final = 10
"""A dead link to NATS is noticed after two of these, seconds."""


def new_id() -> str:
    """An id that no other batcher has."""
    return f"b-{secrets.token_hex(4)}"


class Batcher:
    """All models of one process on one connection to NATS."""

    def __init__(
        self, nats_client: Client, settings: Settings, batcher: str, tracer: Tracer
    ) -> None:
        self._settings = settings
        self._spans = RowSpans(tracer)
        self._delivery = Delivery(nats_client, batcher)
        self._forsaken = Forsaken(nats_client)
        self._peers = Peers(batcher)
        self._reporter = Reporter(nats_client, batcher, self._report)
        process = Process(
            nats_client, batcher, self._delivery, self._spans, self._peers, self._reporter.changed
        )
        self._lines = [
            Line(process, model, addresses(settings, model), settings) for model in settings.models
        ]

    def apply(self, settings: Settings) -> None:
        """Takes policies, weights and limits of ``settings`` into force; see `sluice.settings.reload.Apply`."""
        check_change(self._settings, settings)
        self._settings = settings
        for line in self._lines:
            line.change(settings)

    def on_control(self, message: control_pb2.ControlMessage) -> None:
        """See `batcher.delivery.Listener`."""
        for line in self._lines:
            line.on_control(message)

    def on_report(self, report: control_pb2.BatcherReport) -> None:
        """See `batcher.delivery.Listener`."""
        self._peers.take(report, time.monotonic())
        for line in self._lines:
            line.on_peers()

    def on_loss(self) -> None:
        """NATS stands again, or messages were dropped: open pulls may be gone."""
        for line in self._lines:
            line.intake.restart()

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop``, then drains."""
        for line in self._lines:
            await line.intake.prepare()
        await self._forsaken.listen()
        await self._delivery.listen(self)
        async with asyncio.TaskGroup() as group:
            reporting = group.create_task(self._reporter.run())
            running = [group.create_task(line.run()) for line in self._lines]
            pulling = [group.create_task(line.intake.run()) for line in self._lines]
            await stop.wait()
            await _end(reporting)
            await self._reporter.leave()
            await _end(*pulling)
            await self._drain()
            await _end(*running)
        self._spans.close()
        for line in self._lines:
            await line.close()

    async def _drain(self) -> None:
        async with asyncio.TaskGroup() as group:
            for line in self._lines:
                group.create_task(line.drain(self._settings.batcher.drain_s))

    def _report(self) -> list[control_pb2.ModelReport]:
        return [line.report() for line in self._lines]


def addresses(settings: Settings, model: ModelSettings) -> tuple[str, ...]:
    """Where ``model`` is served.

    Raises:
        SettingsError: the configuration does not say.
    """
    urls = model.triton_urls
    if not urls:
        if settings.triton.url is None:
            raise SettingsError(f"triton.url: is not set, and model {model.name} has no triton_url")
        urls = (settings.triton.url,)
    return tuple(url.removeprefix("grpc://") for url in urls)


async def serve(
    settings: Settings,
    batcher: str,
    tracer: Tracer,
    stop: asyncio.Event,
    config: Path | None = None,
) -> None:
    """Runs a batcher until ``stop``; SIGHUP makes it read ``config`` again.

    Raises:
        SettingsError: an address is missing.
        NatsUnreachable: NATS did not answer in time.
    """
    for model in settings.models:
        addresses(settings, model)
    async with _connected(settings, batcher, tracer) as process:
        log.info("batcher %s serves %s", batcher, ", ".join(m.name for m in settings.models))
        with reloading(config, process.apply) if config else contextlib.nullcontext():
            await process.run(stop)
    log.info("batcher %s has ended", batcher)


@contextlib.asynccontextmanager
async def _connected(settings: Settings, batcher: str, tracer: Tracer) -> AsyncIterator[Batcher]:
    if settings.nats.url is None:
        raise SettingsError("nats.url: is not set")
    processes: list[Batcher] = []

    def on_loss() -> None:
        for process in processes:
            process.on_loss()

    nats_client = await connect(settings.nats, f"batcher {batcher}", on_loss, PING_INTERVAL_S)
    try:
        processes.append(Batcher(nats_client, settings, batcher, tracer))
        yield processes[0]
    finally:
        await disconnect(nats_client)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
