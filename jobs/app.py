"""The jobs process: start, serve, drain."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from nats.aio.client import Client
from nats.errors import Error as NatsError
from opentelemetry.trace import Tracer

from jobs.gateways import GatewayClient
from jobs.process import JobProcess
from jobs.scheduler import JobScheduler
from jobs.service import JobService
from jobs.store import JobStore
from sluice import errors
from sluice.grpc_server import HEALTH_S, HealthService, server_options
from sluice.settings import Settings
from sluice.startup import listening_at, reachable
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.names import SERVICE_JOBS
from sluice.tls import AUTHORITIES, server_credentials
from sluice.v1.jobs_pb2_grpc import add_JobServiceServicer_to_server
from sluice.wire import jetstream, permissions
from sluice.wire.bucket import Bucket, mesh_key
from sluice.wire.codec import request_reader
from sluice.wire.connection import connect, disconnect
from sluice.wire.jetstream import explained
from sluice.wire.job_calls import is_signed
from sluice.wire.patience import patiently
from sluice.wire.stream_keeper import StreamKeeper

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 1.0
_RETRY_S: Final = 0.25
_HEALTH: Final = "/grpc.health.v1.Health/"


async def serve(
    settings: Settings,
    process: str,
    tracer: Tracer,
    stop: asyncio.Event,
    instruments: Instruments | None = None,
) -> None:
    """Run jobs and answer calls until `stop`.

    Raises:
        SettingsError: `nats.url` is missing, or a certificate cannot be used.
        SetupError: the port is taken, JetStream refuses the streams, or there is no key of the mesh.
        NatsUnreachable: NATS did not answer in time.
    """
    if settings.nats.url is None:
        raise errors.SettingsError("nats.url: is not set")
    tls = settings.tls.mesh
    store = JobStore(settings.jobs, settings.nats.replicas)
    streams = StreamKeeper(store.restore)
    client = await connect(settings.nats, permissions.JOBS, process, streams.check_soon, tls)
    async with contextlib.AsyncExitStack() as resources:
        resources.push_async_callback(disconnect, client)
        key = await _mesh_key(settings, client)
        addresses = settings.jobs.gateways or reachable(settings.gateway.address)
        gateways = GatewayClient(addresses, key, tls)
        resources.push_async_callback(gateways.close)
        await _start_store(store, client)
        instruments = instruments or Instruments()
        of_all = JobProcess(process, settings.jobs, store, gateways, tracer, instruments)
        scheduler = JobScheduler(of_all)
        await MetricsExchange(SERVICE_JOBS, process, instruments).start(client)
        await scheduler.start(client)
        service = JobService(of_all)
        async with _serving(settings.jobs.address, service, key, tls):
            running = asyncio.gather(scheduler.run(), streams.run())
            await stop.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await scheduler.close()
            of_all.outside.close()
    logger.info("jobs process %s stopped", process)


async def _mesh_key(settings: Settings, client: Client) -> str | None:
    """Return the key of the mesh.

    A gateway creates its bucket; with a NATS account of their own, `jobs` never see it.
    """
    secrets_bucket = Bucket(jetstream.SECRETS, settings.nats.replicas)
    secrets_bucket.open(client)
    try:
        return await patiently(
            lambda: mesh_key(settings, secrets_bucket),
            (errors.TransportUnavailable,),
            bound_s=settings.nats.connect_s,
            wait_s=_RETRY_S,
        )
    except errors.TransportUnavailable as error:
        raise errors.SetupError(
            "identity.mesh_key: not set, and not in JetStream; set the gateways' key in "
            "SLUICE_IDENTITY__MESH_KEY"
        ) from error


class _Guard(grpc.aio.ServerInterceptor):
    """Only accepts calls of gateways, which decide whose jobs a call may see; health is for everybody.

    A malformed message, or what a method raises, ends a call with a status.

    Args:
        mesh_key: key with which gateways sign calls; None: calls are unsigned.
    """

    def __init__(self, mesh_key: str | None) -> None:
        self._mesh_key = mesh_key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the guarded method, or a refusal of a call that no gateway of the mesh has signed."""
        is_health = str(handler_call_details.method).startswith(_HEALTH)
        caller = dict(handler_call_details.invocation_metadata or ())
        if not (is_health or self._mesh_key is None or is_signed(caller, self._mesh_key)):
            return grpc.stream_stream_rpc_method_handler(partial(guarded, _refuse))
        handler: Any = await continuation(handler_call_details)
        if handler is None or is_health:
            return handler and _timed(handler)
        reading = request_reader(handler.request_deserializer)
        method = "stream_unary" if handler.stream_unary else "unary_stream"
        method = "unary_unary" if handler.unary_unary else method
        behaviour = {method: partial(guarded, getattr(handler, method))}
        return handler._replace(request_deserializer=reading, **behaviour)


async def guarded(
    behaviour: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any
) -> Any:
    """Call a method; `request` is the request, an iterator of requests, or the error of reading it."""
    try:
        if isinstance(request, errors.SluiceError):
            raise request
        return await behaviour(request, context)
    except errors.SluiceError as error:
        failed = error
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception:
        logger.exception("a call to the jobs service failed")
        failed = errors.InternalError("the jobs service failed; its log has the reason")
    return await context.abort(*failed.as_abort())


def _timed(handler: Any) -> Any:
    """Return a health method that bounds its request, and the answer to a check, by `HEALTH_S`."""
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def answer(_: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(HEALTH_S) as limit:
                request = await context.read()
                if handler.response_streaming:
                    limit.reschedule(None)
                if request is grpc.aio.EOF:
                    raise errors.InvalidRequest("request: is missing; send a HealthCheckRequest")
                if isinstance(request, errors.SluiceError):
                    raise request
                if (response := await behaviour(request, context)) is not None:
                    await context.write(response)
        except TimeoutError as error:
            message = f"request: did not arrive within {HEALTH_S:g} s; send it at once"
            raise errors.DeadlinePassed(message) from error

    reading = request_reader(handler.request_deserializer)
    answering = partial(guarded, answer)
    return grpc.stream_stream_rpc_method_handler(answering, reading, handler.response_serializer)


async def _refuse(_: Any, context: Any) -> None:
    raise errors.PermissionDenied("the jobs service only accepts calls of gateways; call a gateway")


async def _start_store(store: JobStore, client: Client) -> None:
    try:
        await store.start(client)
    except (TimeoutError, NatsError, errors.TransportUnavailable) as error:
        raise errors.SetupError(
            f"JetStream did not create the streams of jobs: {explained(error)}; if its disk is too small, "
            "lower jobs.inputs_max_bytes and jobs.results_max_bytes"
        ) from error


@contextlib.asynccontextmanager
async def _serving(
    address: str, service: JobService, mesh_key: str | None, tls: Path | None
) -> AsyncIterator[None]:
    server = grpc.aio.server(interceptors=[_Guard(mesh_key)], options=server_options())
    add_JobServiceServicer_to_server(service, server)
    health = HealthService()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    host, _ = listening_at(address, "jobs.address")
    if tls is None:
        bound = server.add_insecure_port(address)
    else:
        bound = server.add_secure_port(address, server_credentials(tls, (tls / AUTHORITIES,)))
    await server.start()
    logger.info("jobs service listens on %s:%d", host, bound)
    try:
        yield
    finally:
        health.leave()
        await server.stop(_CLOSE_S)
