"""A whole gateway: opened in the order of its parts, closed backwards."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

from grpc_health.v1 import health, health_pb2_grpc
from nats.errors import Error as NatsError
from opentelemetry.trace import Tracer

from gateway.admission.admission import Admission
from gateway.admission.arrivals import Arrivals
from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.overload import OverloadControl
from gateway.admission.policies import InForce, Policies
from gateway.admission.prompts import Preparation
from gateway.admission.turns import LoopTurns, TextThreads
from gateway.admission.usage import UsageAccounting
from gateway.api.admin_service import ADMIN_SERVICE, AdminService
from gateway.api.generate import Generator
from gateway.api.inference_service import InferenceService
from gateway.api.items_service import ItemsService
from gateway.api.job_forwarder import JOB_SERVICE, JobForwarder
from gateway.api.methods import CallInterceptor
from gateway.api.safety_service import SAFETY_SERVICE, SafetyService
from gateway.api.server import SERVICE, GatewayHealth, GrpcServer, add_reflection
from gateway.http.app import make_app
from gateway.http.connection import Limits
from gateway.http.server import HttpServer, context_of
from gateway.identity.authenticator import Authenticator
from gateway.models.speech import BYTES_A_SECOND, HEAD_BYTES
from gateway.records.store import RecordStore
from gateway.shared.peers import QueryHandler
from gateway.shared.reload import GatewayReload, Load
from gateway.shared.state import SharedState
from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.load_table import Breakers
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.request_record import RequestRecords
from gateway.upstream.cascade import EscalationLimiter
from gateway.upstream.guards import find_entities
from gateway.upstream.nats_transport import NatsTransport
from gateway.upstream.runs import Upstream
from gateway.upstream.shadow_runner import ShadowRunner
from sluice.errors import RETRY_AFTER_S, SetupError, ShuttingDown, SluiceError, TransportUnavailable
from sluice.internal.v1.items_pb2_grpc import add_ItemsServiceServicer_to_server
from sluice.settings import Settings
from sluice.startup import split_address
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.names import SERVICE_GATEWAY
from sluice.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from sluice.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from sluice.v1.safety_pb2_grpc import add_SafetyServiceServicer_to_server
from sluice.wire import permissions
from sluice.wire.connection import MeshClient, connect, disconnect
from sluice.wire.jetstream import explained
from sluice.wire.patience import patiently
from sluice.wire.stream_keeper import StreamKeeper

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
"""Interval of the checks of deadlines, stalls and readiness, in seconds."""
IDLE_TICK_S: Final = 0.5
"""Longest interval of these checks while the gateway is ready and has no requests, in seconds."""
RECORDS_S: Final = 2.0
"""How long records that are not written yet delay the end of a gateway, in seconds."""
STORE_RETRY_S: Final = 0.2
"""Interval at which opening the streams is tried again, in seconds."""


class Gateway:
    """The parts of a gateway, wired together.

    Attributes:
        http: OpenAI's API, unless it is off.
        transport: sends runs to batchers, and knows their loads.
        registry: the live requests.
        usage: what tenants spend, and their limits.
        shared: what the gateways of the mesh share.
        authenticator: says who calls; HTTP asks it too.
        arrivals: the calls that arrive.
        limiter: the calls that run.
        generator: answers requests.
        store: records and audit entries.
        exchange: reads the metrics of all processes.
        streams: creates the streams again that NATS has lost.
        in_force: the policies that requests take.
        reload: replaces them.
    """

    def __init__(
        self,
        settings: Settings,
        gateway_id: str,
        policies: Policies,
        tracer: Tracer,
        instruments: Instruments,
        load: Load,
    ) -> None:
        """Wire the parts of a gateway.

        Args:
            settings: of the mesh.
            gateway_id: unique in the mesh.
            policies: those of `settings`.
            tracer: of this process.
            instruments: of this process.
            load: loads later policies.
        """
        limits = settings.gateway
        self._settings = settings
        self.exchange = MetricsExchange(SERVICE_GATEWAY, gateway_id, instruments)
        replays = ReplayCache(limits.replay_entries, limits.replay_s)
        self.transport = NatsTransport(gateway_id, limits.stall_s, replays)
        self.registry = self.transport.registry
        self.in_force = InForce(policies, self.registry)
        self.authenticator = Authenticator(settings.identity, settings.nats.replicas)
        breakers = Breakers()
        self._overload = OverloadControl(self.transport.loads, breakers)
        self.usage = UsageAccounting(
            self._overload, breakers, self.registry, time.time() - time.monotonic(), time.monotonic
        )
        self.store = RecordStore(
            settings.records, lambda: self.in_force.policies.settings, settings.nats.replicas
        )
        self.limiter = ClassLimiter(
            limits.max_concurrent_requests,
            limits.shares,
            self.in_force,
            self.usage.limits.check_running,
        )
        self.shared = SharedState(
            settings, gateway_id, self.registry, self.in_force, self.usage, self.limiter
        )
        self._health = GatewayHealth(self._overload, self.in_force, self.transport)
        self.streams = StreamKeeper(self._restore_streams)
        self._drift = DriftMonitor(gateway_id, instruments)
        self._upstream, self._admission = self._make_admission()
        self.generator = self._make_generator(tracer, instruments)
        self._make_administration(load)
        self._make_servers()

    def _make_admission(self) -> tuple[Upstream, Admission]:
        """Return what sends runs, and what admits the requests that they are for."""
        turns = LoopTurns()
        preparation = Preparation(self._overload, TextThreads("encoding", turns))
        upstream = Upstream(
            preparation=preparation,
            overload=self._overload,
            usage=self.usage,
            registry=self.registry,
            transport=self.transport,
            stall_s=self._settings.gateway.stall_s,
        )
        admission = Admission(
            self.in_force,
            self.limiter,
            self._overload,
            self.usage,
            preparation,
            partial(find_entities, upstream),
            turns,
        )
        return upstream, admission

    def _make_administration(self, load: Load) -> None:
        """Make what operators use: reloads, queries, trials of safety policies."""
        routing = self._settings.routing
        self._drift.use(
            self.in_force.policies.router.held_out,
            routing.drift,
            from_shadows=routing.drift_from_shadows,
        )
        self.reload = GatewayReload(
            load,
            self.shared,
            self.in_force,
            self.transport.loads,
            self.store,
            self._drift,
            self.authenticator,
        )
        self._admin = AdminService(
            self._settings, self.shared, self.registry, self.store, self._drift, self.exchange
        )
        self._safety = SafetyService(self._admission, self.shared.peers)

    def _make_servers(self) -> None:
        """Make the servers of gRPC and HTTP, and what both use."""
        settings, limits = self._settings, self._settings.gateway
        self._jobs = JobForwarder(
            settings.jobs, lambda: self.authenticator.mesh_key, settings.tls.mesh
        )
        self._audio_max_bytes = 0
        if self.in_force.policies.catalog.hearing:
            self._audio_max_bytes = int(limits.audio_max_s * BYTES_A_SECOND) + HEAD_BYTES
        self.arrivals = Arrivals(
            self.authenticator,
            self.limiter,
            limits.max_message_bytes + self._audio_max_bytes,
            self.generator.metrics.refused,
            self._admission.count_refused,
        )
        self._grpc = self._make_grpc()
        self.http = (
            self._make_http(settings.http.address) if settings.http.address is not None else None
        )
        self._servers = [server for server in (self._grpc, self.http) if server is not None]

    @property
    def address(self) -> str:
        """Address of gRPC, "host:port"."""
        return self._grpc.address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MeshClient]:
        """Serve until the block ends, which has the connection to NATS; then drain and close.

        Raises:
            SetupError, NatsUnreachable: it cannot start.
        """
        try:
            client = await self.start()
            background = asyncio.ensure_future(self.run())
            try:
                yield client
            finally:
                await self.drain()
                background.cancel()
        finally:
            await self.close()

    async def start(self) -> MeshClient:
        """Open the ports, connect to NATS, then accept calls: a gateway that answers can publish.

        Returns the connection.

        Raises:
            SetupError: a port or the id is taken.
            NatsUnreachable: NATS does not answer.
        """
        for server in self._servers:
            server.bind()
        client = await connect(
            self._settings.nats,
            permissions.GATEWAY,
            self.transport.gateway_id,
            self._on_loss,
            self._settings.tls.mesh,
        )
        try:
            await self._start_store(client)
            # First: another process with the same id would get its frames twice, and cancel its rows.
            answers: dict[str, QueryHandler] = {
                "hand_over": self.shared.keys.hand_over,
                "clear_answers": self.shared.answers.forget,
                "dry_run": self._safety.answer_dry_run,
                **self._admin.answers,
            }
            parts = self.reload, self.shared.usage
            refresh_keys = self.authenticator.refresh_keys
            await self.shared.peers.start(client, answers, parts, refresh_keys)
        except BaseException:
            await disconnect(client)
            raise
        await self.exchange.start(client)
        await self.transport.start(client, self.shared.drains.on_report)
        await self.reload.join()
        self._health.refresh(time.monotonic())
        for server in self._servers:
            await server.start()
        logger.info("gateway %s serves gRPC on %s", self.transport.gateway_id, self.address)
        if self.http is not None:
            logger.info(
                "gateway %s serves HTTP on %s", self.transport.gateway_id, self.http.address
            )
        return client

    @property
    def active(self) -> int:
        """Number of calls that run."""
        return self.limiter.active

    async def run(self) -> None:
        """Check deadlines, stalls and readiness, and write records, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.store.run())
            group.create_task(self.streams.run())
            group.create_task(self.shared.run())
            group.create_task(self.authenticator.run())
            group.create_task(self.reload.run())
            group.create_task(self._tick())

    def _on_loss(self) -> None:
        self.shared.on_loss()
        self.streams.check_soon()
        self.transport.on_reconnect()

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            try:
                self.transport.tick(now)
                self._health.refresh(now)
            except Exception:  # without this loop no stall would be noticed
                logger.exception("check of deadlines and stalled runs failed")
            busy = len(self.registry) or not self._health.serving
            wait_s = TICK_S if busy else min(IDLE_TICK_S, self._settings.gateway.stall_s / 1.5)
            due_at = time.monotonic() + wait_s
            await asyncio.sleep(wait_s)
            self.transport.coalescer.note_lag(time.monotonic() - due_at)

    async def drain(self) -> None:
        """Report NOT_SERVING and refuse new calls; running calls get `drain_s` seconds to finish."""
        gateway_id = self.transport.gateway_id
        self._health.leave()
        self.limiter.is_draining = True
        if self.http is not None:
            self.http.drain()
        logger.info("gateway %s is draining: %d calls run", gateway_id, self.limiter.active)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.gateway.drain_s):
                await self.limiter.idle.wait()
        self.registry.fail_all(
            ShuttingDown("the gateway shut down; resume elsewhere", retry_after_s=RETRY_AFTER_S)
        )
        await self.generator.shadows.close()
        await self.store.flush(RECORDS_S)
        await self.shared.close()

    async def close(self) -> None:
        """Close the ports, then NATS."""
        for server in reversed(self._servers):
            await server.close()
        await self._jobs.close()
        self._admission.close()
        self.arrivals.close()
        await self.transport.close()
        logger.info("gateway %s stopped", self.transport.gateway_id)

    async def _start_store(self, client: MeshClient) -> None:
        """Open the streams; in a cluster a new one has no leader for a moment."""
        try:
            await patiently(
                lambda: self._open_store(client),
                (TransportUnavailable,),
                bound_s=self._settings.nats.connect_s,
                wait_s=STORE_RETRY_S,
            )
        except (TimeoutError, NatsError, SluiceError) as error:
            raise SetupError(
                f"JetStream does not take the gateway's streams: {explained(error)}"
            ) from error

    def _hosts(self) -> frozenset[str] | None:
        """Return the names that HTTP serves beside those of this machine; None: all."""
        http = self._settings.http
        if self.authenticator.on or "*" in http.hosts or http.address is None:
            return None
        own, _ = split_address(http.address, "http.address")
        return frozenset(map(str.lower, (*http.hosts, own)))

    async def _restore_streams(self) -> None:
        await self.store.restore()
        await self.shared.restore()

    async def _open_store(self, client: MeshClient) -> None:
        await self.store.start(client)
        await self.shared.open(client)
        self.authenticator.mesh_key = await self.shared.mesh_key()
        await self.authenticator.start(client)

    def _make_generator(self, tracer: Tracer, instruments: Instruments) -> Generator:
        settings = self._settings
        metrics = RequestMetrics(instruments)
        metrics.show(self.registry.dispatch, self.limiter)
        gateway_id = self.transport.gateway_id
        records = RequestRecords(settings.records, self.store, gateway_id, settings.currency)
        return Generator(
            settings=settings.gateway,
            limiter=self.limiter,
            admission=self._admission,
            upstream=self._upstream,
            escalations=EscalationLimiter(),
            state=self.shared,
            records=records,
            metrics=metrics,
            drift=self._drift,
            shadows=ShadowRunner(self._upstream, records, self._drift),
            tracer=tracer,
        )

    def _make_grpc(self) -> GrpcServer:
        settings, limits = self._settings, self._settings.gateway
        interceptor = CallInterceptor(
            limits.max_message_bytes, self.arrivals, self._audio_max_bytes
        )
        grpc_server = GrpcServer(settings, interceptor)
        server = grpc_server.server
        inference = InferenceService(self.generator, self.transport.loads)
        items = ItemsService(self.generator, self.authenticator.of_item)
        # The interceptor gives methods a `GrpcCall` in place of the context that the stubs name.
        add_InferenceServiceServicer_to_server(inference, server)  # type: ignore[arg-type]
        add_AdminServiceServicer_to_server(self._admin, server)  # type: ignore[arg-type]
        add_SafetyServiceServicer_to_server(self._safety, server)  # type: ignore[arg-type]
        add_ItemsServiceServicer_to_server(items, server)  # type: ignore[arg-type]
        server.add_generic_rpc_handlers((self._jobs,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        services = (SERVICE, JOB_SERVICE, SAFETY_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME)
        add_reflection(services, server)
        return grpc_server

    def _make_http(self, address: str) -> HttpServer:
        app = make_app(
            self.generator,
            self._jobs,
            self.arrivals,
            lambda: self._health.serving,
            lambda: self.streams.problem,
            hosts=self._hosts(),
            ping_s=self._settings.http.stream_ping_s,
        )
        limits = Limits(idle_s=self._settings.http.keep_alive_s)
        return HttpServer(address, app, context_of(self._settings.tls), limits)
