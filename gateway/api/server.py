"""gRPC on the gateway's event loop: its port, its certificates, limits of a connection."""

import resource
from typing import Any, Final

import grpc

from gateway.api.interceptor import ErrorInterceptor
from sluice.errors import SetupError
from sluice.settings import Settings
from sluice.startup import listen_problem, split_address
from sluice.tls import AUTHORITIES, server_credentials

KEY: Final = "gateway.address"
KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
_CLIENT_PINGS_MS: Final = 500
"""Clients may ask this often whether the gateway lives; the SDK does so when a stream is silent."""
_CONNECTION_GRACE_MS: Final = 3_600_000
"""A stream that runs when its connection is too old is cut after this time."""
_CLOSE_S: Final = 1.0
CONNECTIONS_MAX: Final = 4096
"""Of gRPC, and of HTTP: each is a file and memory, and anybody may open one."""


def connections_max() -> int:
    """`CONNECTIONS_MAX`, and fewer where that would be over a quarter of the files that the process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if files == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, files // 4)


class GrpcServer:
    """Serves what is added to `server`.

    Attributes:
        address: where, "host:port"; the port is known when it is bound.
    """

    def __init__(self, settings: Settings, interceptor: ErrorInterceptor) -> None:
        self.address = settings.gateway.address
        self.server = grpc.aio.server(
            interceptors=[interceptor], options=_options(settings, interceptor.max_bytes)
        )
        self._tls = settings.tls

    def bind(self) -> None:
        """Opens the port.

        Raises:
            SetupError: it is taken, or the address is none of this machine.
        """
        host, port = split_address(self.address, KEY)
        # Checked first: the error of gRPC does not say what is wrong.
        problem = listen_problem(host, port)
        if problem is not None:
            raise SetupError(
                f"{KEY}: {self.address} is {problem}; choose another or stop what uses it"
            )
        try:
            bound = self._add_port()
        except RuntimeError as error:
            raise SetupError(f"{KEY}: {self.address} cannot be served: {error}") from error
        self.address = f"{self.address.rpartition(':')[0]}:{bound}"

    async def start(self) -> None:
        """Accepts calls, in the background."""
        await self.server.start()

    async def close(self) -> None:
        """Closes the port; calls that still run get a second."""
        await self.server.stop(_CLOSE_S)

    def _add_port(self) -> int:
        tls = self._tls
        if tls.serving is None:
            return self.server.add_insecure_port(self.address)
        # Processes of the mesh call too, with the certificates that they have.
        others = () if tls.mesh is None else (tls.mesh / AUTHORITIES,)
        client_cas = () if tls.client_ca is None else (tls.client_ca, *others)
        return self.server.add_secure_port(
            self.address, server_credentials(tls.serving, client_cas)
        )


def _options(settings: Settings, max_bytes: int) -> list[tuple[str, Any]]:
    limits = settings.gateway
    return [
        ("grpc.so_reuseport", 0),
        # Of one that comes when so many are open the client hears UNAVAILABLE, and tries again.
        ("grpc.max_allowed_incoming_connections", connections_max()),
        # gRPC accepts calls in order of arrival, whoever sent them: what a connection could not be given anyway
        # waits at its client, and not in front of the calls of others.
        ("grpc.max_concurrent_streams", 2 * limits.max_concurrent_requests),
        # More than the limit: a message a little above it gets a typed error with both numbers.
        ("grpc.max_receive_message_length", limits.max_message_bytes + max_bytes),
        # A stream that is not read yet is kept in memory up to its window: 64 KiB, not what the connection could carry.
        ("grpc.http2.bdp_probe", 0),
        # A client connects again, and finds the gateways that were added since; streams go on to their end.
        ("grpc.max_connection_age_ms", int(limits.connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", _CONNECTION_GRACE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _CLIENT_PINGS_MS),
    ]
