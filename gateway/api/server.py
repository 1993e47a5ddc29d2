"""The gRPC server of a gateway: its port, its certificates, limits of a connection, health and reflection.

`grpc.health.v1` shows the readiness of the service and of every model (docs/internals/wire.md, Readiness). The service
is ready while it can answer something: if a guard, a classifier or one of several models is missing, only the requests
that need it fail. `tasks.<name>` is SERVING while requests may send tasks to that version of a model; the
supervisor ends replaced workers once no gateway reports it.

Reflection (https://github.com/grpc/grpc/blob/master/doc/server-reflection.md) is served as v1 and v1alpha, grpcio's own
as v1alpha alone. Both versions have the same messages, so one servicer answers both.
"""

from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as _V1ALPHA
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

from gateway.admission.overload import OverloadControl
from gateway.admission.policies import InForce
from gateway.api.methods import CallInterceptor
from gateway.upstream.nats_transport import NatsTransport
from sluice.errors import SetupError
from sluice.grpc_server import NOT_SERVING, SERVING, HealthService, server_options
from sluice.settings import Settings
from sluice.startup import listening_at
from sluice.tls import AUTHORITIES, server_credentials

SETTING: Final = "gateway.address"
"""The setting of the address, for errors."""
SERVICE: Final = "sluice.v1.InferenceService"
_V1: Final = "grpc.reflection.v1.ServerReflection"
_CONNECTION_GRACE_MS: Final = 3_600_000
"""How long a stream may go on when its connection is too old, in milliseconds."""
_CLOSE_S: Final = 1.0
"""How long running calls have when the server stops, in seconds."""


class GrpcServer:
    """The gateway's gRPC server: add services to `server`, then `bind`, `start` and `close` it, as `HttpServer`.

    Attributes:
        address: Its address, "host:port"; the port is known when it is bound.
        server: The server of grpc.aio; services are added before `start`.
    """

    def __init__(self, settings: Settings, interceptor: CallInterceptor) -> None:
        """Create the server, whose calls all pass `interceptor`."""
        self.address = settings.gateway.address
        self.server = grpc.aio.server(
            interceptors=[interceptor], options=_options(settings, interceptor.max_bytes)
        )
        self._tls = settings.tls

    def bind(self) -> None:
        """Open the port.

        Raises:
            SetupError: The address is malformed, in use, not of this machine, or needs more rights.
            SettingsError: A certificate is missing or invalid.
        """
        # Checked first: the error of gRPC does not say what is wrong.
        listening_at(self.address, SETTING, " or stop what uses it")
        tls = self._tls
        try:
            if tls.serving is None:
                bound = self.server.add_insecure_port(self.address)
            else:
                # Processes of the mesh call too, with the certificates that they have.
                others = () if tls.mesh is None else (tls.mesh / AUTHORITIES,)
                client_cas = () if tls.client_ca is None else (tls.client_ca, *others)
                credentials = server_credentials(tls.serving, client_cas)
                bound = self.server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise SetupError(f"{SETTING}: {self.address} cannot be served: {error}") from error
        self.address = f"{self.address.rpartition(':')[0]}:{bound}"

    async def start(self) -> None:
        """Accept calls, in the background."""
        await self.server.start()

    async def close(self) -> None:
        """Close the port; calls that still run get a second."""
        await self.server.stop(_CLOSE_S)


def _options(settings: Settings, max_bytes: int) -> list[tuple[str, Any]]:
    limits = settings.gateway
    return [
        *server_options(),
        # gRPC accepts calls in order of arrival, whoever sent them. Calls of a connection beyond twice what the
        # gateway runs wait at their client, and not in front of the calls of others.
        ("grpc.max_concurrent_streams", 2 * limits.max_concurrent_requests),
        # More than the limit: a message a little above it gets a typed error with both numbers.
        ("grpc.max_receive_message_length", limits.max_message_bytes + max_bytes),
        # A stream that is not read yet is kept in memory up to its window: 64 KiB, not what the connection could carry.
        ("grpc.http2.bdp_probe", 0),
        # A client connects again, and finds the gateways that were added since; streams go on to their end.
        ("grpc.max_connection_age_ms", int(limits.connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", _CONNECTION_GRACE_MS),
        ("grpc.keepalive_time_ms", int(limits.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(limits.keepalive_timeout_s * 1000)),  # else a minute
    ]


class GatewayHealth:
    """Keeps the statuses of the health service up to date.

    Attributes:
        servicer: The service.
    """

    def __init__(
        self, overload: OverloadControl, in_force: InForce, transport: NatsTransport
    ) -> None:
        """Show which models can answer."""
        self.servicer = HealthService()
        self._overload = overload
        self._in_force = in_force
        self._transport = transport
        self._statuses: dict[str, bool] = {}
        self._leaving = False

    @property
    def serving(self) -> bool:
        """Whether the gateway can answer something."""
        return self._statuses.get(SERVICE, False) and not self._leaving

    def refresh(self, now: float) -> None:
        """Set the statuses that have changed."""
        able = self._transport.is_connected and not self._in_force.problem
        catalog = self._in_force.policies.catalog
        tasks_of, overload = catalog.tasks, self._overload
        models = {
            f"model.{model}": able and overload.is_ready(model, task, now)
            for model, task in tasks_of.items()
        }
        # An open breaker is closed by requests alone, so they must still come here.
        answers = able and any(
            overload.loads.load(tasks_of[model], now).ready for model in catalog.callable
        )
        whole = {SERVICE: answers, "": answers}
        tasks = {f"tasks.{name}": True for name in self._in_force.task_names(now)}
        defaults = dict.fromkeys(self._statuses, False)
        for service, serving in {**defaults, **models, **tasks, **whole}.items():
            if self._statuses.get(service) != serving:
                self._statuses[service] = serving
                self.servicer.set(service, SERVING if serving else NOT_SERVING)

    def leave(self) -> None:
        """Set every status to NOT_SERVING, for good."""
        self._leaving = True
        self.servicer.leave()


def _add_reflection_v1() -> None:
    """Add the file of reflection v1 to the pool: that of v1alpha under another name, as gRPC defines it."""
    alpha = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    old, new = _V1ALPHA.rpartition(".")[0], _V1.rpartition(".")[0]
    file = text_format.Parse(str(alpha).replace(old, new), FileDescriptorProto())
    # Clients know files by their names: two of one name are one file to them.
    file.name = f"{new.replace('.', '/')}/reflection.proto"
    Default().Add(file)


class _ReflectedPool:
    """The default descriptor pool; finds methods by their full name too, which ghz needs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Default(), name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file that declares `symbol`; raise KeyError if none does."""
        try:
            return Default().FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            descriptor = Default().FindServiceByName(service)
            return descriptor.methods_by_name[method].containing_service.file


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Serve the descriptors of `services`, full names, to clients of `server`."""
    _add_reflection_v1()
    servicer = reflection_aio.ReflectionServicer((*services, _V1, _V1ALPHA), pool=_ReflectedPool())

    # A coroutine that writes, as all methods are that the interceptor serves.
    async def answer(requests: Any, call: Any) -> None:
        async for response in servicer.ServerReflectionInfo(requests, call):
            await call.write(response)

    method = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for version in (_V1, _V1ALPHA):
        handler = grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))
