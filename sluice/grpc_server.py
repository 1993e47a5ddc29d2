"""Build the parts that all gRPC servers of a mesh share: limits that hold before a call is known, and health.

Anybody who reaches a port can open a connection and send bytes. What that may cost is limited here, before credentials
are checked: connections, the time of a handshake, and the memory of compressed messages, which gRPC expands before it
compares their size with `grpc.max_receive_message_length`.
"""

import asyncio
import resource
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

CONNECTIONS_MAX: Final = 4096
"""Most open connections of gRPC, and as many of HTTP. Each takes a file and memory, and needs no credentials."""
HANDSHAKE_S: Final = 5.0
"""How long a connection may take until TLS and HTTP/2 are set up, in seconds; gRPC's default is 120."""
CLIENT_PINGS_MS: Final = 500
"""Shortest interval of a client's keepalive pings; the SDK sends them while a stream is silent."""
HEALTH_S: Final = 2.0
"""How long a health check may take, and the request of a watch, in seconds: neither needs credentials."""
_IDENTITY_ONLY: Final = 1
"""Bit set of accepted compression algorithms: bit 0 is `identity`."""

_NOT_SERVED: Final = "service: is not served; leave it empty, or ask for model.<name>"

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def connections_max() -> int:
    """Return `CONNECTIONS_MAX`, or a quarter of the files that the process may open if that is less."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if files == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, files // 4)


def server_options() -> list[tuple[str, Any]]:
    """Return the options of a server that strangers can reach."""
    return [
        ("grpc.so_reuseport", 0),
        # A client above the limit gets UNAVAILABLE and tries again.
        ("grpc.max_allowed_incoming_connections", connections_max()),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        # A compressed call ends with UNIMPLEMENTED. The second option holds if one passes all the same.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ("grpc.per_message_decompression", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PINGS_MS),
    ]


class HealthService:
    """Serve grpc.health.v1.

    The servicer of grpcio-health-checking 1.81 forgets all watchers of a service when one of them leaves, and one that
    does not read delays the others.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": SERVING}
        self._changed = asyncio.Event()
        """Set at the next change of any status, then replaced."""
        self._left = False

    def set(self, service: str, status: int) -> None:
        """Set the status of `service`. Ignored after `leave`."""
        if not self._left:
            self._statuses[service] = status
            self._wake()

    def leave(self) -> None:
        """Set every status to NOT_SERVING, for good."""
        self._left = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service; abort with NOT_FOUND if it is not served."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, _NOT_SERVED)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Write the status of a service, and again whenever it changes."""
        written = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, _UNKNOWN)
            if status != written:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                written = status
            await changed.wait()
