"""Open gRPC channels, identify callers in metadata, and turn gRPC's errors into `sluice.errors`, for both clients."""

import ipaddress
import math
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice import errors
from sluice.defaults import DEFAULT_ADDRESS, TENANT_METADATA
from sluice.errors import InvalidRequest, SluiceError
from sluice.proxies import DIRECT

if TYPE_CHECKING:
    AioChannel = grpc.aio.Channel
    BlockingChannel = grpc.Channel
    AioMethod = grpc.aio.UnaryUnaryMultiCallable
    BlockingMethod = grpc.UnaryUnaryMultiCallable

ADDRESS_VARIABLE: Final = "SLUICE_ADDRESS"
"""Environment variables: defaults of the arguments of `Client`."""
API_KEY_VARIABLE: Final = "SLUICE_API_KEY"
CA_VARIABLE: Final = "SLUICE_CA"
CERT_VARIABLE: Final = "SLUICE_CERT"
KEY_VARIABLE: Final = "SLUICE_KEY"
SYSTEM_CA: Final = "system"
"""Value of `ca` for the public certificate authorities of the system."""

LOOKUP_S: Final = 10.0
"""Default timeout of short calls, such as counting tokens and listing models, in seconds."""
LISTING_S: Final = 120.0
"""Default timeout of calls whose answers may be long, such as listing outcomes, in seconds."""

_LOCALLY_CANCELLED: Final = "Locally cancelled by application!"
"""Details of gRPC's status if this client cancelled the call."""
_TOO_LARGE: Final = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
_HANDSHAKE: Final = re.compile(r"Socket closed|handshake|CERTIFICATE|SSL", re.IGNORECASE)
"""Details of gRPC's status if only one side uses TLS, or a certificate is not trusted."""
_OPTIONS: Final = (
    # With gRPC's own waits (1 s, growing to 120 s), retries would fail without a connection attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The shortest wait for a new connection is also how long it may take.
    ("grpc.min_reconnect_backoff_ms", 3000),
    # Names are resolved again when a connection is lost, or the gateway closes it because of its age.
    ("grpc.dns_min_time_between_resolutions_ms", 10_000),
    # A stopped gateway or a lost host is detected after 3 s of silence, and another gateway continues.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),  # else a minute, whatever the keepalive says
    ("grpc.http2.max_pings_without_data", 0),
    # A response has up to 2048 embeddings of about 4096 numbers.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
RECONNECT_MS_MAX: Final = 2000
"""Longest wait of a client before it reconnects, in milliseconds."""
RECONNECT_IN_MESH_MS_MAX: Final = 250
"""Longest wait of processes inside a mesh, in milliseconds: peers are restarted at once, and there are few of them."""
_SPREAD: Final = ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')
"""Channel option that spreads calls over all reachable gateways."""


def resolve_address(address: str | None) -> str:
    """Return `address`, else the value of SLUICE_ADDRESS, else the default."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def credentials_of(
    ca: str | None = None, cert: str | None = None, key: str | None = None
) -> grpc.ChannelCredentials | None:
    """Return credentials from these PEM files, else from SLUICE_CA, SLUICE_CERT and SLUICE_KEY, if any.

    Raises:
        InvalidRequest: A file cannot be read, or a certificate, key or authority is missing.
    """
    ca = ca or os.environ.get(CA_VARIABLE)
    cert = cert or os.environ.get(CERT_VARIABLE)
    key = key or os.environ.get(KEY_VARIABLE)
    if bool(cert) != bool(key):
        raise InvalidRequest.of("cert", "must be given together with its key")
    if cert and not ca:
        raise InvalidRequest.of(
            "ca",
            "is required with a certificate; name the authorities of the gateway's certificate",
        )
    if not ca:
        return None
    roots = None if ca == SYSTEM_CA else _file("ca", ca)
    own = (_file("key", key), _file("cert", cert)) if key and cert else (None, None)
    return grpc.ssl_channel_credentials(roots, *own)


def _file(field: str, path: str) -> bytes:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest.of(field, f"{path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise InvalidRequest.of(field, f"{path} is not PEM")
    return content


def open_aio(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    reconnect_ms_max: int = RECONNECT_MS_MAX,
) -> grpc.aio.Channel:
    """Open a channel for asyncio; call this inside the running event loop. Raise as `target_of`."""
    options = _options_of(address, reconnect_ms_max)
    if credentials is None:
        return grpc.aio.insecure_channel(target_of(address), options)
    return grpc.aio.secure_channel(target_of(address), credentials, options)


def open_blocking(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """Open a channel for threads; raise as `target_of`."""
    options = _options_of(address, RECONNECT_MS_MAX)
    if credentials is None:
        return grpc.insecure_channel(target_of(address), options)
    return grpc.secure_channel(target_of(address), credentials, options)


def target_of(address: str) -> str:
    """Return gRPC's target for `address`: one address, or several separated by commas.

    A single address is passed on, and gRPC resolves its name whenever it connects. gRPC accepts several addresses only
    as numbers, so their names are resolved here, once, which blocks; names that cannot be resolved are left out.

    Raises:
        InvalidRequest: One of several addresses is not HOST:PORT, or none of their names can be resolved.
    """
    parts = [part.strip() for part in address.split(",") if part.strip()]
    if len(parts) < 2:
        return parts[0] if parts else address
    # gRPC takes several addresses as numbers of one family only.
    numbers = [number for part in parts for number in _numbers_of(part)]
    # The first address that can be resolved decides on the family.
    kind = next((kind for kind, _ in numbers), None)
    if kind is None:
        raise InvalidRequest.of("address", f"none of {address} can be resolved")
    return f"{kind}:" + ",".join(number for number_kind, number in numbers if number_kind == kind)


def _options_of(address: str, reconnect_ms_max: int) -> tuple[tuple[str, str | int], ...]:
    options: list[tuple[str, str | int]] = [
        *_OPTIONS,
        ("grpc.max_reconnect_backoff_ms", reconnect_ms_max),
    ]
    first, *others = [part.strip() for part in address.split(",") if part.strip()] or [address]
    # Calls on this machine never go through an HTTP proxy.
    numbers = [_ip_of(part) for part in (first, *others)]
    if all(number is not None and number.is_loopback for number in numbers):
        options.append(DIRECT)
    if others:
        options.append(("grpc.default_authority", first))  # what each certificate must name
    # Several gateways, or a name that may have several addresses.
    if others or numbers == [None]:
        # For a single gateway gRPC's default policy is better: it reconnects with the next call, without a wait.
        options.append(_SPREAD)
    return tuple(options)


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in HOST:PORT; None for a name other than localhost."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def _numbers_of(part: str) -> list[tuple[str, str]]:
    """Return the numeric addresses of HOST:PORT, with the scheme of their family."""
    host, colon, port = part.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidRequest.of("address", f"{part!r} is not HOST:PORT")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    # A name may have addresses of both families, but gRPC accepts one family: IPv4, which every host has.
    numbers: dict[str, list[tuple[str, str]]] = {"ipv4": [], "ipv6": []}
    for family, *_, where in addresses:
        kind = "ipv6" if family == socket.AF_INET6 else "ipv4"
        number = f"[{where[0]}]" if kind == "ipv6" else where[0]
        numbers[kind].append((kind, f"{number}:{port}"))
    return numbers["ipv4"] or numbers["ipv6"]


def call_metadata(tenant: str | None, api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return metadata that identifies the caller: the tenant if given, and `api_key` or else SLUICE_API_KEY.

    Raises:
        InvalidRequest: The key is not printable ASCII.
    """
    tenant_pair = () if tenant is None else ((TENANT_METADATA, tenant),)
    key = (api_key or os.environ.get(API_KEY_VARIABLE) or "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequest.of(
            "api_key", "has characters that no key has; send printable ASCII without blanks"
        )
    return (*tenant_pair, *bearer_metadata(key))


def bearer_metadata(credential: str | None) -> tuple[tuple[str, str], ...]:
    """Return metadata with a credential; empty without one."""
    return (("authorization", f"Bearer {credential}"),) if credential else ()


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current OpenTelemetry span as W3C trace context; empty without a span."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def check_timeout(timeout_s: float | None) -> None:
    """Check that a timeout is finite; one of 0 or less fails later, as a deadline that has passed.

    Raises:
        InvalidRequest: It is infinite or NaN.
    """
    if timeout_s is not None and not math.isfinite(timeout_s):
        raise InvalidRequest.of("timeout_s", f"{timeout_s} is not a number of seconds")


class ConnectionLost(errors.TransportUnavailable):
    """The gateway cannot be reached, or a stream broke off."""

    default_retry_s = None


def error_of(call: grpc.RpcError) -> SluiceError:
    """Return the error of a failed call. A status that is not of a gateway becomes the nearest class, with its code."""
    return _typed(call) or _foreign(call.code(), call.details() or "")


@contextmanager
def reading(call: grpc.RpcContext | grpc.aio.Call) -> Iterator[None]:
    """Translate errors of `call` inside the block, and cancel the call at its end, which gRPC does not do."""
    try:
        yield
    except grpc.RpcError as failed:
        raise error_of(failed) from failed
    finally:
        call.cancel()


def may_resume(error: SluiceError) -> bool:
    """Return whether a new call may continue the request: the gateway, or what it needs, is unavailable for now."""
    return error.code is grpc.StatusCode.UNAVAILABLE


def _typed(call: grpc.RpcError) -> SluiceError | None:
    # Both kinds of calls return pairs or None, which the type stubs do not show.
    trailer = dict(cast("Iterable[tuple[str, bytes]]", call.trailing_metadata() or ()))
    if errors.STATUS_DETAILS not in trailer:
        return None
    try:
        return errors.from_status(status_pb2.Status.FromString(trailer[errors.STATUS_DETAILS]))
    except DecodeError:
        return None


def _foreign(code: grpc.StatusCode, details: str) -> SluiceError:
    metadata = {"code": code.name}
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlinePassed("the answer was not complete in time", metadata=metadata)
    if code is grpc.StatusCode.UNAVAILABLE:
        if _HANDSHAKE.search(details):
            details += f"; if the gateway is encrypted, name its authorities in {CA_VARIABLE}"
        return ConnectionLost(details, metadata=metadata)
    if code is grpc.StatusCode.CANCELLED:
        if details == _LOCALLY_CANCELLED:
            return errors.Cancelled(details, metadata=metadata)
        # A server that closes its port ends calls that arrive at that moment like this; so do proxies.
        return ConnectionLost("the server ended the call", metadata=metadata)
    if sizes := _TOO_LARGE.search(details):
        metadata |= {"bytes": sizes[1], "limit_bytes": sizes[2]}
        return errors.MessageTooLarge(
            f"the message of {sizes[1]} bytes is over the limit of {sizes[2]} bytes",
            metadata=metadata,
        )
    return errors.InternalError(f"{code.name}: {details}", metadata=metadata)
