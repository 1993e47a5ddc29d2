"""The batcher process: start-up, and drain in the reverse order."""

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

from batcher.core.workers import Peers
from batcher.gateways import Gateways, Reporter
from batcher.jetstream.acks import MaxDeliveries
from batcher.model_loop import ModelLoop, Process
from batcher.spans import RowSpans
from sluice.internal.v1 import control_pb2
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.settings.reload import refuse_changes, reloading
from sluice.wire.connection import connect, disconnect

log = logging.getLogger(__name__)

PING_INTERVAL_S: Final = 10
"""A dead link to NATS is noticed after two of these, seconds."""

LIVE_KEYS: Final = frozenset(
    f"batcher.{name}"
    for name in ("policy", "policies", "prefetch_rows", "prefetch_bytes", "drain_s")
)
"""Settings that a running batcher takes over at once; the rest needs a new process."""
SECTIONS: Final = ("models", "nats", "triton", "batcher")
"""Sections of the settings that a batcher depends on; others may change."""


def new_id() -> str:
    """An id that no other batcher has."""
    return f"b-{secrets.token_hex(4)}"


def check_change(before: Settings, after: Settings) -> None:
    """Raises SettingsError, with the key, when ``after`` changes what cannot be changed while running."""
    refuse_changes(before, after, SECTIONS, LIVE_KEYS)


class Batcher:
    """All models of one process on one connection to NATS."""

    def __init__(
        self, nats_client: Client, settings: Settings, batcher: str, tracer: Tracer
    ) -> None:
        self._settings = settings
        self._spans = RowSpans(tracer)
        self._gateways = Gateways(nats_client, batcher)
        self._max_deliveries = MaxDeliveries(nats_client)
        self._peers = Peers(batcher)
        self._reporter = Reporter(nats_client, batcher, self._report)
        process = Process(
            nats_client, batcher, self._gateways, self._spans, self._peers, self._reporter.changed
        )
        self._loops = [
            ModelLoop(process, model, addresses(settings, model), settings)
            for model in settings.models
        ]

    def apply(self, settings: Settings) -> None:
        """Activates policies, weights and limits of ``settings``; see `sluice.settings.reload.Apply`."""
        check_change(self._settings, settings)
        self._settings = settings
        for loop in self._loops:
            loop.change(settings)

    def _on_control(self, message: control_pb2.ControlMessage) -> None:
        for loop in self._loops:
            loop.on_control(message)

    def _on_report(self, report: control_pb2.BatcherReport) -> None:
        self._peers.take(report, time.monotonic())
        for loop in self._loops:
            loop.wake()  # Our share of the workers may have changed.

    def on_loss(self) -> None:
        """NATS was reconnected, or messages were dropped: open pulls may be lost."""
        for loop in self._loops:
            loop.inbox.restart()

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop``, then drains."""
        for loop in self._loops:
            await loop.inbox.prepare()
        await self._max_deliveries.listen()
        await self._gateways.listen(self._on_control, self._on_report)
        async with asyncio.TaskGroup() as group:
            reporting = group.create_task(self._reporter.run())
            running = [group.create_task(loop.run()) for loop in self._loops]
            pulling = [group.create_task(loop.inbox.run()) for loop in self._loops]
            await stop.wait()
            await _end(reporting)
            await self._reporter.leave()
            await _end(*pulling)
            await self._drain()
            await _end(*running)
        self._spans.close()
        for loop in self._loops:
            await loop.close()

    async def _drain(self) -> None:
        async with asyncio.TaskGroup() as group:
            for loop in self._loops:
                group.create_task(loop.drain(self._settings.batcher.drain_s))

    def _report(self) -> list[control_pb2.ModelReport]:
        return [loop.report() for loop in self._loops]


def addresses(settings: Settings, model: ModelSettings) -> tuple[str, ...]:
    """The addresses of the Tritons that serve ``model``.

    Raises:
        SettingsError: the configuration has none.
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
