"""Wire the parts of a gateway, and start, drain and close them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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
from gateway.admission.tenant_limits import TenantLimits
from gateway.admission.turns import LoopTurns, TextThreads
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
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.request_record import RequestRecords
from gateway.upstream.cascade import EscalationLimiter
from gateway.upstream.guards import find_entities
from gateway.upstream.nats_transport import NatsTransport
from gateway.upstream.runs import Upstream
from gateway.upstream.shadow_runner import ShadowRunner
from sluice.background import wait_for_event
from sluice.errors import SetupError, ShuttingDown, SluiceError, TransportUnavailable
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
        limits: what tenants may use, and have used.
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

        Raises:
            SettingsError, SetupError: a certificate or the address of HTTP cannot be used.
        """
        limits, replicas = settings.gateway, settings.nats.replicas
        self._settings = settings
        self.exchange = MetricsExchange(SERVICE_GATEWAY, gateway_id, instruments)
        replays = ReplayCache(limits.replay_entries, limits.replay_s)
        self.transport = NatsTransport(gateway_id, limits.stall_s, replays)
        self.registry, loads = self.transport.registry, self.transport.loads
        self.in_force = in_force = InForce(policies, self.registry)
        self.authenticator = Authenticator(settings.identity, replicas)
        overload = OverloadControl(loads, self.registry)
        offset_s = time.time() - time.monotonic()
        self.limits = TenantLimits(lambda: in_force.policies.settings, time.monotonic, offset_s)
        self.store = store = RecordStore(
            settings.records, lambda: in_force.policies.settings, replicas
        )
        calls_max, check_tenant = limits.max_concurrent_requests, self.limits.check_running
        self.limiter = ClassLimiter(calls_max, limits.shares, in_force, check_tenant)
        self.shared = shared = SharedState(
            settings, gateway_id, self.registry, in_force, self.limits, self.limiter
        )
        self._health = GatewayHealth(overload, in_force, self.transport)
        self.streams = StreamKeeper(self._restore_streams)
        drift = DriftMonitor(gateway_id, instruments)
        drift.use(policies.router.held_out, settings.routing.drift)
        self.generator = self._make_generator(overload, drift, tracer, instruments)
        self.reload = GatewayReload(load, shared, in_force, loads, store, drift, self.authenticator)
        self._admin = AdminService(settings, shared, self.registry, store, drift, self.exchange)
        self._safety = SafetyService(self.generator.admission, shared.peers)
        self._jobs = JobForwarder(
            settings.jobs, lambda: self.authenticator.mesh_key, settings.tls.mesh
        )
        audio_max_bytes = 0
        if policies.catalog.hearing:
            audio_max_bytes = int(limits.audio_max_s * BYTES_A_SECOND) + HEAD_BYTES
        self.arrivals = Arrivals(
            self.authenticator,
            self.limiter,
            limits.max_message_bytes + audio_max_bytes,
            self.generator.metrics.refused,
            self.limits.count_refused,
        )
        self._grpc = self._make_grpc(audio_max_bytes)
        self.http = self._make_http()
        self._servers = [server for server in (self._grpc, self.http) if server is not None]

    def _make_generator(
        self,
        overload: OverloadControl,
        drift: DriftMonitor,
        tracer: Tracer,
        instruments: Instruments,
    ) -> Generator:
        """Return what answers requests."""
        settings, turns = self._settings, LoopTurns()
        preparation = Preparation(overload, TextThreads("encoding", turns))
        upstream = Upstream(
            preparation,
            overload,
            self.limits,
            self.registry,
            self.transport,
            settings.gateway.stall_s,
        )
        read_entities = partial(find_entities, upstream)
        admission = Admission(
            self.in_force, self.limiter, overload, self.limits, preparation, read_entities, turns
        )
        metrics = RequestMetrics(instruments)
        metrics.show(self.registry.dispatch, self.limiter)
        gateway_id = self.transport.gateway_id
        records = RequestRecords(settings.records, self.store, gateway_id, settings.currency)
        return Generator(
            settings=settings.gateway,
            limiter=self.limiter,
            admission=admission,
            upstream=upstream,
            escalations=EscalationLimiter(),
            state=self.shared,
            records=records,
            metrics=metrics,
            drift=drift,
            shadows=ShadowRunner(upstream, records),
            tracer=tracer,
        )

    def _make_grpc(self, audio_max_bytes: int) -> GrpcServer:
        max_bytes = self._settings.gateway.max_message_bytes
        interceptor = CallInterceptor(max_bytes, self.arrivals, audio_max_bytes)
        grpc_server = GrpcServer(self._settings, interceptor)
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

    def _make_http(self) -> HttpServer | None:
        http, hosts = self._settings.http, None
        if http.address is None:
            return None
        if not self.authenticator.on and "*" not in http.hosts:
            # The names that it serves beside those of this machine.
            own, _ = split_address(http.address, "http.address")
            hosts = frozenset(map(str.lower, (*http.hosts, own)))
        app = make_app(
            self.generator,
            self._jobs,
            self.arrivals,
            lambda: self._health.serving,
            lambda: self.streams.problem,
            hosts=hosts,
            ping_s=http.stream_ping_s,
        )
        limits = Limits(idle_s=http.keep_alive_s)
        return HttpServer(http.address, app, context_of(self._settings.tls), limits)

    @property
    def address(self) -> str:
        """Address of gRPC, "host:port"."""
        return self._grpc.address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MeshClient]:
        """Serve until the block ends, which has the connection to NATS; then drain and close.

        Raises:
            SetupError, SettingsError, NatsUnreachable: see `start`.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            client = await self.start()
            background = asyncio.ensure_future(self.run())
            stack.callback(background.cancel)
            stack.push_async_callback(self.drain)
            yield client

    async def start(self) -> MeshClient:
        """Open the ports, connect to NATS, then accept calls: a gateway that answers can publish.

        Returns:
            The connection.

        Raises:
            SetupError: a port or the id is taken, or JetStream does not take the streams.
            SettingsError: a certificate, a key file or the policies of the last reload cannot be used.
            NatsUnreachable: NATS does not answer.
        """
        for server in self._servers:
            server.bind()
        nats, gateway_id = self._settings.nats, self.transport.gateway_id
        client = await connect(
            nats, permissions.GATEWAY, gateway_id, self._on_loss, self._settings.tls.mesh
        )
        try:
            await self._start_store(client)
            # Before the transport: two processes with one id would get each other's frames, and cancel the runs.
            answers: dict[str, QueryHandler] = {
                "hand_over": self.shared.keys.hand_over,
                "clear_answers": self.shared.answers.forget,
                "dry_run": self._safety.answer_dry_run,
                **self._admin.answers,
            }
            parts = self.reload, self.shared.usage
            await self.shared.peers.start(client, answers, parts, self.authenticator.refresh_keys)
        except BaseException:
            await disconnect(client)
            raise
        await self.exchange.start(client)
        await self.transport.start(client, self.shared.drains.on_report)
        await self.reload.join()
        self._health.refresh(time.monotonic())
        for server in self._servers:
            await server.start()
        logger.info("gateway %s serves gRPC on %s", gateway_id, self.address)
        if self.http is not None:
            logger.info("gateway %s serves HTTP on %s", gateway_id, self.http.address)
        return client

    @property
    def active(self) -> int:
        """Number of calls that run."""
        return self.limiter.active

    async def run(self) -> None:
        """Check deadlines and readiness, write records, send heartbeats, and read what is shared, until cancelled."""
        parts = self.store, self.streams, self.shared, self.authenticator, self.reload
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part.run())
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
        """Report NOT_SERVING and refuse new calls; running calls get `drain_s` seconds, then their requests fail.

        Then store what is pending, and announce that this gateway leaves. `run` must still be running.
        """
        gateway_id = self.transport.gateway_id
        self._health.leave()
        self.limiter.is_draining = True
        if self.http is not None:
            self.http.drain()
        logger.info("gateway %s is draining: %d calls run", gateway_id, self.limiter.active)
        await wait_for_event(self.limiter.idle, self._settings.gateway.drain_s)
        self.registry.fail_all(ShuttingDown("the gateway shut down; resume elsewhere"))
        await self.generator.shadows.close()
        await self.store.flush(RECORDS_S)
        await self.shared.close()

    async def close(self) -> None:
        """Close the ports, then NATS."""
        for server in reversed(self._servers):
            await server.close()
        await self._jobs.close()
        await self.generator.admission.close()
        self.arrivals.close()
        await self.transport.close()
        logger.info("gateway %s stopped", self.transport.gateway_id)

    async def _start_store(self, client: MeshClient) -> None:
        """Open the streams and read what they have; retry, as a new stream of a cluster has no leader for a moment."""

        async def open_store() -> None:
            await self.store.start(client)
            await self.shared.open(client)
            self.authenticator.mesh_key = await self.shared.mesh_key()
            await self.authenticator.start(client)

        bound_s = self._settings.nats.connect_s
        try:
            await patiently(
                open_store, (TransportUnavailable,), bound_s=bound_s, wait_s=STORE_RETRY_S
            )
        except (TimeoutError, NatsError, SluiceError) as error:
            raise SetupError(
                f"JetStream does not take the gateway's streams: {explained(error)}"
            ) from error

    async def _restore_streams(self) -> None:
        await self.store.restore()
        await self.shared.restore()
