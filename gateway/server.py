"""A whole gateway: opened in the order of its parts, closed backwards."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from nats.aio.client import Client
from nats.errors import Error as NatsError
from opentelemetry.trace import Tracer

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.load_table import ModelLoadTable
from gateway.admission.overload import OverloadControl
from gateway.admission.pipeline import Admission
from gateway.admission.usage import UsageAccounting
from gateway.api.admin_service import ADMIN_SERVICE, AdminService, MeshControl
from gateway.api.generate import Generator, RequestObservers
from gateway.api.health import SERVICE, GatewayHealth
from gateway.api.inference_service import InferenceService
from gateway.api.interceptor import Callers, ErrorInterceptor
from gateway.api.items_service import ItemsService
from gateway.api.job_forwarder import JOB_SERVICE, JobForwarder
from gateway.api.reflection import add_reflection
from gateway.api.safety_service import SAFETY_SERVICE, SafetyService
from gateway.api.texts import TextCalls
from gateway.audio.wav import BYTES_A_SECOND, HEAD_BYTES
from gateway.identity.authenticator import Authenticator
from gateway.models.catalog import Catalog
from gateway.records.record_builder import RecordBuilders
from gateway.records.store import RecordStore
from gateway.routing.breaker import Breakers
from gateway.routing.cascade.limit import EscalationLimiter
from gateway.routing.router import Router
from gateway.safety.inspector import Inspector
from gateway.shared.answers import AnswerCache
from gateway.shared.drains import Drains
from gateway.shared.forget import Forgetting
from gateway.shared.keys import SharedKeys
from gateway.shared.limit_use import SharedLimits
from gateway.shared.peers import HELLO_S, Peers
from gateway.shared.running import RunningRequests
from gateway.shared.spending import SharedSpending
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.registry import Registry
from gateway.streaming.resume_token import ResumeKey
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.upstream.guard_client import GuardClient
from gateway.upstream.nats_transport import NatsTransport
from gateway.upstream.rows import Upstream
from gateway.upstream.served_models import ServedModels
from gateway.upstream.shadow_runner import ShadowRunner
from sluice.errors import SetupError, ShuttingDown, SluiceError, TransportUnavailable
from sluice.internal.v1.items_pb2_grpc import add_ItemsServiceServicer_to_server
from sluice.settings import Settings, SettingsError
from sluice.settings.routing import RoutingSettings
from sluice.startup import listen_problem, split_address
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.names import SERVICE_GATEWAY
from sluice.telemetry.registry import MetricRegistry
from sluice.telemetry.tracing import unsent
from sluice.tls import AUTHORITIES, server_context, server_credentials
from sluice.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from sluice.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from sluice.v1.safety_pb2_grpc import add_SafetyServiceServicer_to_server
from sluice.wire import jetstream, permissions
from sluice.wire.bucket import Bucket, mesh_key, shared_secret
from sluice.wire.connection import connect, disconnect
from sluice.wire.patience import patiently

if TYPE_CHECKING:
    from gateway.http.server import HttpServer

_log = logging.getLogger(__name__)

TICK_S: Final = 0.1
"""Interval of the checks of deadlines, stalls and readiness, seconds."""
RETRY_AFTER_S: Final = 1.0
_CLOSE_S: Final = 1.0
_RECORDS_S: Final = 2.0
_STORE_RETRY_S: Final = 0.2
KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
_CLIENT_PINGS_MS: Final = 500
"""Clients may ask this often whether the gateway lives; the SDK does so when a stream is silent."""
_CONNECTION_GRACE_MS: Final = 3_600_000
"""A stream that runs when its connection is too old is cut after this time."""


class Gateway:
    """The parts of a gateway, wired together.

    Attributes:
        address: where gRPC is served, "host:port".
        http: OpenAI's API, unless it is off.
        registry: the live requests.
        peers: the other gateways.
        spending: of the tenants.
        authenticator: says who calls; HTTP asks it too.
        policies: the policies that all gateways have taken with a reload.
        models: replaces those that are served.
        before_serving: what to do when NATS is connected, before calls are accepted.
    """

    def __init__(
        self,
        settings: Settings,
        gateway_id: str,
        catalog: Catalog,
        inspector: Inspector,
        router: Router,
        tracer: Tracer,
        metric_registry: MetricRegistry,
    ) -> None:
        limits = settings.gateway
        self.address = limits.address
        self._settings = settings
        self._loads = ModelLoadTable()
        dispatch = Dispatch(gateway_id, self._loads, limits.stall_s)
        self.registry = Registry(dispatch, ReplayCache(limits.replay_entries, limits.replay_s))
        self._transport = NatsTransport(
            gateway_id, self.registry, self._loads, partial(unsent, tracer)
        )
        self.peers = Peers(gateway_id)
        self.policies = Bucket(jetstream.policies_bucket(), settings.nats.replicas)
        self.before_serving: list[Callable[[], Awaitable[None]]] = []
        self._secrets = Bucket(jetstream.secrets_bucket(), settings.nats.replicas)
        self._drains = Drains(gateway_id, Bucket(jetstream.drains_bucket(), settings.nats.replicas))
        self._exchange = MetricsExchange(SERVICE_GATEWAY, gateway_id, metric_registry)
        self._api_keys = Bucket(jetstream.api_keys_bucket(), settings.nats.replicas)
        self.authenticator = Authenticator(settings.identity, settings.nats.replicas)
        self._resume_key = ResumeKey(limits.resume_key or "")
        self._key_bucket = Bucket(jetstream.keys_bucket(), settings.nats.replicas)
        keep_s = limits.replay_s if limits.replay_entries else 0.0
        self._keys = SharedKeys(self.registry, self._key_bucket, self.peers, keep_s)
        answers = jetstream.answers_bucket(
            settings.cache.max_mib * 1024 * 1024, settings.cache.max_age_s
        )
        self._answer_bucket = Bucket(answers, settings.nats.replicas)
        self._answers = AnswerCache(settings.cache, self._answer_bucket, self.peers)
        self._store = RecordStore(
            settings.records, settings.routing.outcomes, settings.nats.replicas
        )
        records = RecordBuilders(
            settings.records, self._store, catalog.facts, gateway_id, settings.currency
        )
        self._breakers = Breakers(settings.routing.breaker)
        unix_offset_s = time.time() - time.monotonic()
        usage = UsageAccounting(
            self._breakers, catalog.facts, self.registry, unix_offset_s, time.monotonic
        )
        self.limits = usage.limits
        self.use_limits(settings)
        self._overload = OverloadControl(
            self._loads,
            fallbacks=settings.routing.fallbacks,
            models=catalog.facts,
            queue_max=limits.queue_max,
            breakers=self._breakers,
        )
        self._admission = admission = Admission(
            catalog, overload=self._overload, inspector=inspector, router=router, usage=usage
        )
        self._spending_bucket = Bucket(jetstream.spending_bucket(), settings.nats.replicas)
        self.spending = usage.spending
        self._shared_spending = SharedSpending(
            self.spending,
            self._spending_bucket,
            self.peers,
            lambda: admission.router.has_budgets or usage.limits.has_costs,
        )
        self._days_bucket = Bucket(jetstream.days_bucket(), settings.nats.replicas)
        self._shared_days = SharedSpending(
            usage.days, self._days_bucket, self.peers, lambda: usage.limits.has_costs, "days"
        )
        self._drift = DriftMonitor(gateway_id, self._store.publish_event, metric_registry)
        self._drift.use(router.held_out, settings.routing.drift)
        upstream = Upstream(
            admission=admission,
            overload=self._overload,
            usage=usage,
            registry=self.registry,
            transport=self._transport,
            stall_s=limits.stall_s,
        )
        admission.entities = guards = GuardClient(upstream)
        self._shadows = ShadowRunner(upstream, self._store, self._drift)
        self._limiter = ClassLimiter(limits.max_concurrent_requests, limits.shares, usage.limits)
        self._shared_limits = SharedLimits(
            usage, self._limiter, self.peers, lambda: self._transport.connected, time.monotonic
        )
        metrics = RequestMetrics(metric_registry)
        metrics.show_running(lambda: self.active)
        observers = RequestObservers(
            records=records,
            metrics=metrics,
            drift=self._drift,
            shadows=self._shadows,
        )
        generator = Generator(
            settings=limits,
            limiter=self._limiter,
            resume_key=self._resume_key,
            upstream=upstream,
            escalations=EscalationLimiter(),
            guards=guards,
            keys=self._keys,
            answers=self._answers,
            observers=observers,
            tracer=tracer,
        )
        texts = TextCalls(limits, self._limiter, upstream, self._answers, records, metrics, tracer)
        self._service = InferenceService(generator, texts, admission, self._loads)
        self._items = ItemsService(generator, texts, catalog)
        self._jobs = JobForwarder(
            settings.jobs, lambda: self.authenticator.mesh_key, settings.tls.mesh
        )
        self.models = ServedModels(catalog, self._loads, self.registry, dispatch)
        self._health = GatewayHealth(
            self._loads,
            catalog,
            lambda: self._transport.connected,
            self._transport.stores,
            self.models.in_use,
        )
        self._reread = asyncio.Event()
        self.http: HttpServer | None = None
        if settings.http.address is not None:
            self.http = self._make_http(settings.http.address, generator, texts, catalog)
        hears = bool(catalog.hearing)
        audio_max_bytes = int(limits.audio_max_s * BYTES_A_SECOND) + HEAD_BYTES if hears else 0
        self._server = self._make_server(limits.max_message_bytes, audio_max_bytes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serves until the block ends; then drains and closes.

        Raises:
            SetupError, NatsUnreachable: it cannot start.
        """
        try:
            await self.start()
            background = asyncio.ensure_future(self.run())
            try:
                yield
            finally:
                await self.drain()
                background.cancel()
        finally:
            await self.close()

    async def start(self) -> None:
        """Opens the ports, connects to NATS, then accepts calls: a gateway that answers can publish.

        Raises:
            SetupError: a port or the id is taken.
            NatsUnreachable: NATS does not answer.
        """
        self._bind()
        client = await connect(
            self._settings.nats,
            permissions.GATEWAY,
            self._transport.gateway_id,
            self._on_loss,
            self._settings.tls.mesh,
        )
        try:
            await self._start_store(client)
            # First: another process with the same id would get its frames twice, and cancel its rows.
            await self.peers.start(client)
        except BaseException:
            await disconnect(client)
            raise
        await self._exchange.start(client)
        await self._transport.start(client)
        for prepare in self.before_serving:
            await prepare()
        await self._health.refresh(time.monotonic())
        await self._server.start()
        if self.http is not None:
            await self.http.start()
        _log.info("gateway %s serves on %s", self._transport.gateway_id, self.address)
        if self.http is not None:
            _log.info("HTTP is served on %s", self.http.address)

    async def use_routing(self, router: Router, routing: RoutingSettings) -> None:
        """Later requests are routed by ``router``.

        Raises:
            SettingsError: outcomes cannot be kept as ``routing`` says; nothing has changed.
        """
        try:
            await self._store.use_outcomes(routing.outcomes)
        except (TimeoutError, NatsError) as error:
            raise SettingsError(f"routing.outcomes: JetStream does not take it: {error}") from error
        self._admission.router = router
        self._drift.use(router.held_out, routing.drift)
        self._overload.fallbacks = routing.fallbacks
        self._breakers.settings = routing.breaker

    def use_limits(self, settings: Settings) -> None:
        """Later requests have the limits of ``settings``, and are kept as long as they say."""
        self._store.use_retention(settings.retention_s)
        self.limits.use(settings.limits, settings.tenant_limits)

    @property
    def active(self) -> int:
        """Calls that run."""
        return self._limiter.active

    def ready(self, model: str) -> bool:
        """Whether a worker that serves ``model`` (its task name) is alive, by the reports of batchers."""
        return self._loads.has_worker(model, time.monotonic())

    async def run(self) -> None:
        """Checks deadlines, stalls and readiness, and writes records, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._store.run())
            group.create_task(self.peers.run())
            group.create_task(self._share_spending())
            group.create_task(self.authenticator.run())
            group.create_task(self._tick())

    async def _share_spending(self) -> None:
        while True:
            await asyncio.sleep(HELLO_S)
            if self._reread.is_set():
                self._reread.clear()
                try:
                    for spending in (self._shared_spending, self._shared_days):
                        await spending.read()
                except SluiceError as error:
                    _log.warning("the spending of tenants was not read: %s", error)
            for spending in (self._shared_spending, self._shared_days):
                await spending.write()

    def _on_loss(self) -> None:
        self._reread.set()
        self._transport.on_reconnect()

    async def _tick(self) -> None:
        while True:
            now = time.monotonic()
            try:
                self.registry.tick(now, connected=self._transport.connected)
                self._loads.expire(now)
                await self._health.refresh(now)
            except Exception:  # without this loop no stall would be noticed
                _log.exception("tick failed")
            await asyncio.sleep(TICK_S)

    async def drain(self) -> None:
        """Reports NOT_SERVING and refuses new calls; running calls get ``drain_s`` seconds to finish."""
        await self._health.leave()
        self._limiter.draining = True
        _log.info("draining: %d calls run", self._limiter.active)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.gateway.drain_s):
                await self._limiter.idle.wait()
        self.registry.fail_all(
            ShuttingDown("the gateway shut down; resume elsewhere", retry_after_s=RETRY_AFTER_S)
        )
        await self._shadows.close()
        await self._store.flush(_RECORDS_S)
        await self._keys.close()
        await self._answers.close(_RECORDS_S)
        await self._shared_spending.write()
        await self._shared_days.write()
        await self.peers.close()

    async def close(self) -> None:
        """Closes the ports, then NATS."""
        if self.http is not None:
            await self.http.close()
        await self._server.stop(_CLOSE_S)
        await self._jobs.close()
        self._admission.close()
        await self._transport.close()
        _log.info("gateway %s closed", self._transport.gateway_id)

    async def _start_store(self, client: Client) -> None:
        """In a cluster a stream that has just been made has no leader for a moment."""
        try:
            await patiently(
                lambda: self._open_store(client),
                (TransportUnavailable,),
                bound_s=self._settings.nats.connect_s,
                wait_s=_STORE_RETRY_S,
            )
        except (TimeoutError, NatsError, SluiceError) as error:
            raise SetupError(f"JetStream does not take the gateway's streams: {error}") from error

    async def _open_store(self, client: Client) -> None:
        await self._store.start(client)
        await self._drains.start(client)
        buckets = [
            self._key_bucket,
            self._spending_bucket,
            self._days_bucket,
            self._api_keys,
            self.policies,
            self._secrets,
        ]
        if self._settings.cache.enabled:
            buckets.append(self._answer_bucket)
        for bucket in buckets:
            await bucket.start(client)
        await self._shared_spending.read()
        await self._shared_days.read()
        if self._settings.gateway.resume_key is None:
            self._resume_key.use(await shared_secret(self._secrets, "resume_key"))
        self.authenticator.mesh_key = await mesh_key(self._settings, self._secrets)
        await self.authenticator.start(client)

    def _make_server(self, max_message_bytes: int, audio_max_bytes: int) -> grpc.aio.Server:
        callers = Callers(self.authenticator)
        server = grpc.aio.server(
            interceptors=[
                ErrorInterceptor(max_message_bytes, self._limiter, callers, audio_max_bytes)
            ],
            options=[
                ("grpc.so_reuseport", 0),
                # gRPC accepts calls in order of arrival, whoever sent them: what a connection could not be given anyway
                # waits at its client, and not in front of the calls of others.
                ("grpc.max_concurrent_streams", 2 * self._settings.gateway.max_concurrent_requests),
                # Twice the limit: a message a little above it gets a typed error with both numbers.
                ("grpc.max_receive_message_length", 2 * max_message_bytes + audio_max_bytes),
                # A client connects again, and finds the gateways that were added since; streams go on to their end.
                ("grpc.max_connection_age_ms", int(self._settings.gateway.connection_age_s * 1000)),
                ("grpc.max_connection_age_grace_ms", _CONNECTION_GRACE_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a minute
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", _CLIENT_PINGS_MS),
            ],
        )
        add_InferenceServiceServicer_to_server(self._service, server)
        allowed = self._settings.gateway.allow_remote_outcomes
        running = RunningRequests(self.registry, self.peers)
        forgetting = Forgetting(
            self.registry,
            running,
            self._answers,
            self._store,
            self.peers,
            self._api_keys,
            self._key_bucket,
        )
        mesh = MeshControl(
            running,
            self._drains,
            self._exchange,
            self._shared_limits,
            forgetting,
            self._settings.currency,
        )
        admin = AdminService(
            self._store,
            self._drift,
            self.peers,
            mesh,
            self._answers,
            allow_remote_outcomes=allowed,
        )
        add_AdminServiceServicer_to_server(admin, server)
        safety = SafetyService(self._admission, self._limiter, self.peers)
        add_SafetyServiceServicer_to_server(safety, server)
        add_ItemsServiceServicer_to_server(self._items, server)
        server.add_generic_rpc_handlers((self._jobs,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        services = (SERVICE, JOB_SERVICE, SAFETY_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME)
        add_reflection(services, server)
        return server

    def _make_http(
        self, address: str, generator: Generator, texts: TextCalls, catalog: Catalog
    ) -> "HttpServer":
        # Imported here: a gateway without HTTP does without its libraries.
        from gateway.http.app import make_app
        from gateway.http.server import HttpServer

        app = make_app(
            generator,
            texts,
            catalog,
            self._loads,
            self._jobs,
            self.authenticator,
            lambda: self._health.serving,
            local_only=not (self._settings.gateway.allow_remote or self.authenticator.on),
        )
        return HttpServer(address, app, self._http_context())

    def _bind(self) -> None:
        key = "gateway.address"
        host, port = split_address(self.address, key)
        # Checked first: the error of gRPC does not say what is wrong.
        problem = listen_problem(host, port)
        if problem is not None:
            raise SetupError(
                f"{key}: {self.address} is {problem}; choose another or stop what uses it"
            )
        try:
            bound = self._add_port()
        except RuntimeError as error:
            raise SetupError(f"{key}: {self.address} cannot be served: {error}") from error
        self.address = f"{self.address.rpartition(':')[0]}:{bound}"
        if self.http is not None:
            self.http.bind()

    def _add_port(self) -> int:
        tls = self._settings.tls
        if tls.serving is None:
            return self._server.add_insecure_port(self.address)
        # Processes of the mesh call too, with the certificates that they have.
        others = () if tls.mesh is None else (tls.mesh / AUTHORITIES,)
        client_cas = () if tls.client_ca is None else (tls.client_ca, *others)
        return self._server.add_secure_port(
            self.address, server_credentials(tls.serving, client_cas)
        )

    def _http_context(self) -> ssl.SSLContext | None:
        tls = self._settings.tls
        if tls.serving is None:
            return None
        client_cas = () if tls.client_ca is None else (tls.client_ca,)
        return server_context(tls.serving, client_cas, "http/1.1")
