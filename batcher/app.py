"""The batcher process: start, serve, drain.

`Batcher` owns a `ModelLoop` for each model and the connection to NATS. Messages of gateways arrive
here and go to the loop of their model; frames go back through `GatewayTransport`.
"""

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from opentelemetry.trace import Tracer

from batcher.core.queued_request import checked_task
from batcher.gateways import GatewayTransport, Reporter
from batcher.metrics import BatcherMetrics
from batcher.model_loop import BatcherProcess, ModelLoop
from batcher.spans import RequestSpans
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

logger = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""How much longer than its limit a drain may take, in seconds."""
RESTART_S: Final = 0.5
"""Pause before a model starts again after its loop failed, in seconds."""
MINUTE_S: Final = 60.0
"""Interval at which policy schedules are evaluated, in seconds; their times have whole minutes."""

LIVE_KEYS: Final = frozenset(f"batcher.{name}" for name in ("policy", "policies", "drain_s"))
"""Settings of `SECTIONS` that a running batcher applies on reload; others there need a restart."""
SECTIONS: Final = ("nats", "triton", "batcher", "tls")
"""Sections that a batcher depends on and cannot change; `check_change` checks the models."""


def check_change(before: Settings, after: Settings) -> None:
    """Raise SettingsError, naming the key, if a reload changes what cannot change, or a model has no address."""
    refuse_changes(before, after, SECTIONS, LIVE_KEYS)
    served = {model.task_name: model for model in before.served}
    for model in after.served:
        addresses(after, model)
        former = served.get(model.task_name)
        if former is not None and not model.same_workers(former):
            raise SettingsError(
                f"models: {model.name}: its workers changed, but running requests may need the "
                "former ones; give the changed model a new generation and put the former one "
                "into retiring"
            )


class Batcher:
    """All models of one process on one connection to NATS.

    Attributes:
        loops: the loops of the models, by task name; read-only for others.
    """

    def __init__(
        self,
        nats_client: MeshClient,
        settings: Settings,
        batcher: str,
        tracer: Tracer,
        instruments: Instruments,
    ) -> None:
        self._settings = settings
        self._drains = control_pb2.DrainsChanged()
        self._replies = BackgroundTasks()
        self._process = BatcherProcess(
            batcher,
            GatewayTransport(nats_client, batcher),
            Reporter(nats_client, self._report),
            RequestSpans(tracer),
            BatcherMetrics(instruments),
            channel_credentials(settings.tls.mesh),
        )
        self.loops = {model.task_name: self._new_loop(model) for model in settings.served}
        self._running: dict[str, asyncio.Task[None]] = {}
        """Task of each loop, once `run` was called."""
        self._group = asyncio.TaskGroup()

    def _new_loop(self, model: ModelSettings) -> ModelLoop:
        urls = addresses(self._settings, model)
        loop = ModelLoop(self._process, model, urls, self._settings)
        loop.drain_workers(self._drained(model.task_name))
        return loop

    def _on_drains(self, drains: control_pb2.DrainsChanged) -> None:
        if drains.revision <= self._drains.revision:
            return
        self._drains = drains
        workers = [drained.worker for drained in drains.record.workers]
        logger.info("drained workers: %s", workers or "none")
        for model, loop in self.loops.items():
            loop.drain_workers(self._drained(model))

    def _drained(self, model: str) -> frozenset[str]:
        workers = self._drains.record.workers
        return frozenset(drained.worker for drained in workers if drained.model == model)

    async def apply(self, settings: Settings) -> None:
        """Activate policies, weights, drain time and models; see `sluice.settings.reload.Apply`.

        Returns when the models that are no longer served have drained.
        """
        check_change(self._settings, settings)
        self._settings = settings
        for loop in self.loops.values():
            loop.change(settings)
        served = {model.task_name: model for model in settings.served}
        for name in served.keys() - self.loops.keys():
            self.loops[name] = self._new_loop(served[name])
            self._start(served[name])
        await asyncio.gather(*map(self._stop_model, self.loops.keys() - served.keys()))
        self._process.reporter.on_readiness()

    def _start(self, model: ModelSettings) -> None:
        self.loops[model.task_name].log_notes()
        self._running[model.task_name] = self._group.create_task(self._serve(model))

    async def _stop_model(self, name: str) -> None:
        """Stop serving a model, and return its remaining requests to their gateways."""
        loop, drain_s = self.loops[name], self._settings.batcher.drain_s
        with contextlib.suppress(TimeoutError):  # a loop that is being restarted does not answer
            async with asyncio.timeout(drain_s + CLOSE_S):
                await loop.drain(drain_s)
        await _cancel(self._running.pop(name))
        loop = self.loops.pop(name)
        await loop.close()
        self._process.metrics.on_model_stopped(name)
        logger.info("stopped serving model %s", name)

    # Messages of gateways.

    def on_task(self, payload: bytes, headers: dict[str, str] | None) -> None:
        """Pass a task to its model. A task that is dropped is queried, and sent again, by its gateway."""
        try:
            task = checked_task(payload)
        except MalformedMessage as error:
            logger.error("dropped malformed task: %s", error)
            return
        self._process.gateways.on_message(task.gateway, time.monotonic())
        loop = self.loops.get(task.model)
        if loop is not None:
            loop.on_task(task, headers or {}, len(payload))

    def on_control(self, message: control_pb2.ControlMessage, is_broadcast: bool) -> None:
        """Handle a control message.

        A cancel names no model: it bundles requests of several, and a loop ignores the others'.
        """
        self._process.gateways.on_message(message.gateway, time.monotonic())
        match message.WhichOneof("message"):
            case "announce":
                # The gateway has just started: requests under its name are of its former process.
                self.drop_gateway(message.gateway)
                self._process.reporter.on_readiness()
            case "drains_changed":
                self._on_drains(message.drains_changed)
            case "cancel":
                for loop in self.loops.values():
                    loop.on_cancel(message.cancel.tasks)
            case "query":
                unknown = [
                    frame_pb2.TaskRef(request_id=query.request_id, attempt=query.attempt)
                    for query in message.query.tasks
                    if not any(loop.on_query(query) for loop in self.loops.values())
                ]
                # A broadcast query reaches all batchers: another one may have the request.
                if unknown and not is_broadcast:
                    bundle = frame_pb2.FrameBundle(batcher=self._process.batcher, unknown=unknown)
                    self._replies.spawn(self._process.gateways.send(message.gateway, bundle))

    def drop_gateway(self, gateway: str, is_gone: bool = True) -> None:
        """Drop requests of an absent gateway: those that no worker has, and all once it is gone."""
        for loop in self.loops.values():
            loop.drop_gateway(gateway, waiting_only=not is_gone)

    def on_loss(self) -> None:
        """Recover after a reconnect of NATS, or after dropped messages."""
        self._process.gateways.on_reconnect(time.monotonic())
        self._process.reporter.on_readiness()  # gateways may have given this batcher up

    async def listen(self) -> None:
        """Start to receive messages of gateways."""
        await self._process.gateways.listen(self.on_task, self.on_control, self.drop_gateway)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain."""
        await self.listen()
        async with self._group as group:
            reporting = group.create_task(self._process.reporter.run())
            scheduling = group.create_task(self._follow_schedules())
            for model in self._settings.served:
                self._start(model)
            await stop.wait()
            await _cancel(reporting, scheduling)
            await self._process.reporter.leave()
            await asyncio.gather(*map(self._stop_model, list(self.loops)))
        self._process.spans.close()

    async def _follow_schedules(self) -> None:
        """Activate scheduled policies at their minutes."""
        while True:
            await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S)
            moment = datetime.now(UTC)
            for loop in self.loops.values():
                loop.follow_schedule(moment, self._settings.weights)

    async def _serve(self, model: ModelSettings) -> None:
        """Run a model. After a fault it starts anew, and gateways send its requests again."""
        name = model.task_name
        while True:
            try:
                await self.loops[name].run()
            except Exception:
                logger.exception("model %s failed, restarting it without its requests", name)
            failed, self.loops[name] = self.loops[name], self._new_loop(model)
            await failed.close()
            self._process.reporter.on_readiness()
            await asyncio.sleep(RESTART_S)

    def _report(self) -> control_pb2.BatcherReport:
        gateways = self._process.gateways.count(time.monotonic())
        return control_pb2.BatcherReport(
            batcher=self._process.batcher,
            models=[loop.report(gateways) for loop in self.loops.values()],
            drains_revision=self._drains.revision,
        )


def addresses(settings: Settings, model: ModelSettings) -> tuple[str, ...]:
    """Return the addresses of the Tritons that serve a model.

    Raises:
        SettingsError: the configuration has none.
    """
    urls = model.triton_urls
    if not urls:
        if settings.triton.url is None:
            raise SettingsError(
                f"triton.url: not set, and model {model.name} has no triton_url; set one of them"
            )
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
    """Run a batcher until `stop`; SIGHUP or `sluice reload` makes it read `config` again.

    Raises:
        SettingsError: an address is missing, or the certificate cannot be used.
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
        models = ", ".join(model.task_name for model in settings.served)
        logger.info("batcher %s serves models %s", batcher, models)
        async with contextlib.AsyncExitStack() as stack:
            if config is not None:
                await stack.enter_async_context(reloading(config, process.apply, nats_client))
            await process.run(stop)
    finally:
        await disconnect(nats_client)
    logger.info("batcher %s stopped", batcher)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
