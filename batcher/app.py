"""The batcher process: start-up, and drain in the reverse order."""

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from opentelemetry.trace import Tracer

from batcher.core.row import checked_task
from batcher.gateways import Gateways, Reporter
from batcher.metrics import BatcherMetrics
from batcher.model_loop import ModelLoop, Process
from batcher.spans import RowSpans
from sluice.background import BackgroundTasks
from sluice.internal.v1 import control_pb2, frame_pb2
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.settings.reload import refuse_changes
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.names import SERVICE_BATCHER
from sluice.tls import channel_credentials
from sluice.wire import permissions
from sluice.wire.codec import MalformedMessage
from sluice.wire.connection import MeshClient, connect, disconnect
from sluice.wire.reload import reloading

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""How long a drain may take beyond its limit, seconds."""
RESTART_S: Final = 0.5
"""Pause before a model starts again after a fault of its loop, seconds."""

LOOK_S: Final = 1.0
"""How often it is asked whether gateways are there whose spans may not be sent yet, seconds."""

MINUTE_S: Final = 60.0
"""How often schedules of policies are looked at, seconds: their times, and the offsets of time zones, have whole
minutes."""

LIVE_KEYS: Final = frozenset(
    f"batcher.{name}" for name in ("policy", "policies", "room_rows", "room_bytes", "drain_s")
)
"""Settings that a running batcher takes over at once; the rest needs a new process."""
SECTIONS: Final = ("nats", "triton", "batcher", "tls")
"""Sections of the settings that a batcher depends on and cannot change; `check_change` looks at models itself."""


def check_change(before: Settings, after: Settings) -> None:
    """Raises SettingsError, with the key, when ``after`` changes what cannot be changed while running."""
    refuse_changes(before, after, SECTIONS, LIVE_KEYS)
    known = {model.task_name: model for model in before.served}
    for model in after.served:
        addresses(after, model)
        if model.task_name in known and not model.same_workers(known[model.task_name]):
            raise SettingsError(
                f"models: {model.name}: its rows may need the workers that it has: give the changed model another "
                "generation, and put the former one into retiring"
            )


class Batcher:
    """All models of one process on one connection to NATS."""

    def __init__(
        self,
        nats_client: MeshClient,
        settings: Settings,
        batcher: str,
        tracer: Tracer,
        instruments: Instruments,
    ) -> None:
        self._settings = settings
        self._spans = RowSpans(tracer)
        self._gateways = Gateways(nats_client, batcher)
        self._reporter = Reporter(nats_client, self._report)
        self._drains = control_pb2.DrainsChanged()
        self._answering = BackgroundTasks()
        self._process = Process(
            batcher,
            self._gateways,
            self._spans,
            self._reporter.changed,
            self._reporter.capacity_changed,
            BatcherMetrics(instruments),
            channel_credentials(settings.tls.mesh),
        )
        self._loops = {model.task_name: self._new_loop(model) for model in settings.served}
        self._running: dict[str, asyncio.Task[None]] = {}
        """Of each loop, once `run` was called."""
        self._group = asyncio.TaskGroup()

    def _new_loop(self, model: ModelSettings) -> ModelLoop:
        urls = addresses(self._settings, model)
        loop = ModelLoop(self._process, model, urls, self._settings)
        loop.drain_workers(self._drained(model.task_name))
        return loop

    def _take_drains(self, drains: control_pb2.DrainsChanged) -> None:
        if drains.revision <= self._drains.revision:
            return
        self._drains = drains
        log.info("drained workers: %s", [one.worker for one in drains.record.workers] or "none")
        for model, loop in self._loops.items():
            loop.drain_workers(self._drained(model))

    def _drained(self, model: str) -> frozenset[str]:
        return frozenset(one.worker for one in self._drains.record.workers if one.model == model)

    async def apply(self, settings: Settings) -> None:
        """Activates policies, weights, limits and models of ``settings``; see `sluice.settings.reload.Apply`."""
        check_change(self._settings, settings)
        self._settings = settings
        for loop in self._loops.values():
            loop.change(settings)
        served = {model.task_name: model for model in settings.served}
        for name in served.keys() - self._loops.keys():
            self._loops[name] = self._new_loop(served[name])
            self._start(served[name])
        await asyncio.gather(*map(self._end_model, self._loops.keys() - served.keys()))
        self._reporter.changed()

    def _start(self, model: ModelSettings) -> None:
        self._loops[model.task_name].log_notes()
        self._running[model.task_name] = self._group.create_task(self._serve(model))

    async def _end_model(self, name: str) -> None:
        """Serves a model no longer. Rows that it still has are returned to their gateways."""
        loop, drain_s = self._loops[name], self._settings.batcher.drain_s
        with contextlib.suppress(TimeoutError):  # one that is just beginning anew does not answer
            async with asyncio.timeout(drain_s + CLOSE_S):
                await loop.drain(drain_s)
        await _end(self._running.pop(name))
        loop = self._loops.pop(name)
        await loop.close()
        self._process.metrics.ended(name)
        log.info("%s is not served any more", name)

    # Events, see `batcher.gateways.GatewayEvents`.

    def on_task(self, payload: bytes, headers: dict[str, str] | None) -> None:
        """Gives a task to its model; one that cannot be read or served is left to its gateway, which asks for it."""
        try:
            task = checked_task(payload)
        except MalformedMessage as error:
            log.error("a task is dropped: %s", error)
            return
        self._gateways.heard(task.gateway, time.monotonic())
        loop = self._loops.get(task.model)
        if loop is not None:
            loop.on_task(task, headers or {}, len(payload))

    def on_control(self, message: control_pb2.ControlMessage, *, broadcast: bool) -> None:
        """Cancels rows, answers which of them this batcher has, or reports to a new gateway."""
        self._gateways.heard(message.gateway, time.monotonic())
        match message.WhichOneof("message"):
            case "announce" if message.announce.leaving:
                self._spans.of_gateways.forget(message.gateway)
            case "announce":
                # It has just begun: rows under its name are of the process before it, and would only delay its own.
                self.on_gateway_gone(message.gateway)
                self._reporter.changed()
            case "drains_changed":
                self._take_drains(message.drains_changed)
            case "cancel":
                for loop in self._loops.values():
                    loop.on_cancel(message.cancel.tasks)
        unknown = [
            frame_pb2.TaskRef(request_id=asked.request_id, attempt=asked.attempt)
            for asked in message.query.tasks
            if not any(loop.on_question(asked) for loop in self._loops.values())
        ]
        if unknown and not broadcast:
            bundle = frame_pb2.FrameBundle(batcher=self._process.batcher, unknown=unknown)
            self._answering.spawn(self._gateways.send(message.gateway, bundle))

    def on_gateway_gone(self, gateway: str, *, waiting_only: bool = False) -> None:
        """Drops the rows of a gateway; ``waiting_only``: not those that a worker has."""
        for loop in self._loops.values():
            loop.on_gateway_gone(gateway, waiting_only=waiting_only)

    def on_loss(self) -> None:
        """NATS was reconnected, or messages were dropped."""
        self._gateways.restart(time.monotonic())
        self._reporter.changed()  # gateways may have given it up

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop``, then drains."""
        await self._gateways.listen(self)
        async with self._group as group:
            reporting = group.create_task(self._reporter.run())
            looking = group.create_task(self._look_for_gateways())
            scheduling = group.create_task(self._follow_schedules())
            for model in self._settings.served:
                self._start(model)
            await stop.wait()
            await _end(reporting, looking, scheduling)
            await self._reporter.leave()
            await asyncio.gather(*map(self._end_model, list(self._loops)))
        self._spans.close()

    async def _look_for_gateways(self) -> None:
        """Traces whose gateway was killed say that they are incomplete."""
        while True:
            await asyncio.sleep(LOOK_S)
            gateways = self._spans.of_gateways.processes(time.monotonic())
            for gateway in await self._gateways.absent(gateways) if gateways else ():
                self._spans.of_gateways.lost(gateway, time.monotonic())

    async def _follow_schedules(self) -> None:
        """Put policies in force at the minutes at which their schedules say so."""
        while True:
            await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S)
            moment = datetime.now(UTC)
            for loop in self._loops.values():
                loop.follow_schedule(moment)

    async def _serve(self, model: ModelSettings) -> None:
        """Runs a model; after a fault it begins anew, and gateways send its rows again."""
        while True:
            name = model.task_name
            try:
                await self._loops[name].run()
            except Exception:
                log.exception("the loop of model %s failed; its rows are sent again", name)
            faulty, self._loops[name] = self._loops[name], self._new_loop(model)
            await faulty.close()
            self._reporter.changed()
            await asyncio.sleep(RESTART_S)

    def _report(self) -> control_pb2.BatcherReport:
        gateways = self._gateways.count(time.monotonic())
        return control_pb2.BatcherReport(
            batcher=self._process.batcher,
            models=[loop.report(gateways) for loop in self._loops.values()],
            drains_revision=self._drains.revision,
        )


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
    instruments: Instruments | None = None,
) -> None:
    """Runs a batcher until ``stop``; SIGHUP or `sluice reload` makes it read ``config`` again.

    Raises:
        SettingsError: an address is missing.
        NatsUnreachable: NATS did not answer in time.
    """
    for model in settings.served:
        addresses(settings, model)
    if settings.nats.url is None:
        raise SettingsError("nats.url: is not set")
    instruments = instruments or Instruments()
    process: Batcher | None = None

    def on_loss() -> None:
        if process is not None:
            process.on_loss()

    tls = settings.tls.mesh
    nats_client = await connect(settings.nats, permissions.BATCHER, batcher, on_loss, tls)
    try:
        await MetricsExchange(SERVICE_BATCHER, batcher, instruments).start(nats_client)
        process = Batcher(nats_client, settings, batcher, tracer, instruments)
        log.info("batcher %s serves %s", batcher, ", ".join(m.task_name for m in settings.served))
        async with contextlib.AsyncExitStack() as stack:
            if config is not None:
                await stack.enter_async_context(reloading(config, process.apply, nats_client))
            await process.run(stop)
    finally:
        await disconnect(nats_client)
    log.info("batcher %s has ended", batcher)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
