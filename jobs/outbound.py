"""URLs that callers chose: webhooks and inputs.

HTTP reaches private addresses only if the operator lists them. For each connection a name is resolved once,
every address behind it is checked, and the connection goes to a checked address: a second resolution could
return another machine. Redirects are not followed.

A file is downloaded over several connections, if one breaks:

1. A connection that ends before the announced length, or within a chunk, is broken.
2. The rest is requested with `Range` and `If-Range`, so that it is that of the same version.
3. Without a strong ETag two versions cannot be told apart. Then, or if the version changed, the
   download fails, and the caller starts again.
"""

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Timer
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from typing_extensions import override

from sluice.errors import InvalidRequest, SluiceError, TransportUnavailable

TIMEOUT_S: Final = 10.0
"""Timeout of connecting, and of each read or write, in seconds."""
POST_S: Final = 20.0
"""Timeout of a whole call with its response, in seconds."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_LEADING_AWAY: Final[tuple[_Network, ...]] = (
    *map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")),
    *map(ipaddress.IPv6Network, ("2001::/23", "2002::/16", "2001:db8::/32", "3fff::/20")),
)

Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a name.

    Raises:
        OSError: there are none.
        UnicodeError: it is no host name.
    """
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in results]


@dataclass(frozen=True, slots=True)
class CheckedUrl:
    """A checked URL: its parts, and the address to connect to."""

    parts: SplitResult
    port: int
    address: str


def is_public(address: _Address) -> bool:
    """Return whether an address is public on the Internet (IANA's registries of special addresses).

    Of IPv6 only 2000::/3 is in use for that; 6to4, Teredo and ORCHID within it lead elsewhere or
    nowhere. Addresses that stand for others (IPv4-mapped, NAT64, site-local) lead wherever a
    gateway of this network sends them.
    """
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    special = any(address in network for network in _LEADING_AWAY)
    return address.is_global and not address.is_multicast and not special


class Outbound:
    """Opens URLs; those at private addresses only if the operator lists them.

    Args:
        allowed: names of hosts and networks ("10.1.0.0/16", "127.0.0.1") that may be reached although they
            are private, over http too.
        resolve: returns the addresses of a name.
        wait: waits for this many seconds before a broken download continues.
        post_s: timeout of a whole call with its response, in seconds.
    """

    def __init__(
        self,
        allowed: Sequence[str] = (),
        resolve: Resolve = resolve,
        wait: Callable[[float], None] = time.sleep,
        post_s: float = POST_S,
    ) -> None:
        self._resolve, self._wait, self._post_s = resolve, wait, post_s
        self._networks: list[_Network] = []
        self._hosts: set[str] = set()
        for host_or_network in allowed:
            try:
                self._networks.append(ipaddress.ip_network(host_or_network, strict=False))
            except ValueError:
                self._hosts.add(host_or_network.lower())

    def check(self, url: str, field: str) -> CheckedUrl:
        """Return where a URL leads. Blocks while its name is resolved.

        Raises:
            InvalidRequest: it may not be opened; names `field`.
            TransportUnavailable: its name cannot be resolved now.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise InvalidRequest.of(field, "not a URL; send https://HOST/PATH") from error
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidRequest.of(field, "not an http or https URL; send https://HOST/PATH")
        if parts.username is not None or any(char <= " " or char > "~" for char in url):
            raise InvalidRequest.of(
                field, "has a user, white space or non-ASCII characters; remove or escape them"
            )
        listed = host in self._hosts
        try:
            addresses = self._resolve(host, port)
        except UnicodeError as error:  # an empty label, or one with over 63 characters
            raise InvalidRequest.of(field, f"{host} is not a valid host name") from error
        except OSError as error:
            raise TransportUnavailable(f"{host} cannot be resolved") from error
        # Every address counts: the resolver may order them differently next time.
        for address in addresses:
            public = is_public(ipaddress.ip_address(address.partition("%")[0]))
            if not (listed or public or self._is_listed(address)):
                raise InvalidRequest.of(
                    field,
                    f"{host} is at {address}, which is private and not allowed by the operator (jobs.private_hosts)",
                )
        if parts.scheme == "http" and not (listed or self._is_listed(addresses[0])):
            raise InvalidRequest.of(
                field, "not https; http is only allowed for hosts in jobs.private_hosts"
            )
        return CheckedUrl(parts, port, addresses[0])

    def post(self, url: str, headers: Mapping[str, str], body: bytes, field: str) -> int:
        """Send a body; return the status of the response.

        Raises:
            InvalidRequest: as for `check`.
            TransportUnavailable: there was no response.
        """
        with self._request("POST", url, field, headers, body, self._post_s) as response:
            return response.status

    def read(self, url: str, field: str) -> Generator[bytes]:
        """Yield all bytes behind a URL in pieces, even if connections break.

        Raises:
            InvalidRequest: as for `check`, or the server refuses.
            TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
        """
        name = self.check(url, field).parts.netloc
        position, size, version, failures = 0, None, "", 0
        while True:
            begin, headers = position, {"Accept-Encoding": "identity"}
            if begin:
                headers |= {"Range": f"bytes={begin}-", "If-Range": version}
            try:
                with self._request("GET", url, field, headers) as response:
                    if (
                        begin
                        and response.status in _CHANGED
                        and not _is_rest(response, begin, size)
                    ):
                        version = ""
                        raise _broken(name, "the file changed while it was read")
                    if response.status != (206 if begin else 200):
                        raise _refused(name, field, response.status)
                    if not begin:
                        tag = response.headers.get("ETag", "")
                        version = "" if tag.startswith("W/") else tag
                        size = response.length
                    while piece := response.read1(PIECE_BYTES):
                        position += len(piece)
                        yield piece
                if size is None or position >= size:
                    return
                raise _broken(name, f"ended after {position} of {size} bytes")
            except TransportUnavailable:
                # A connection that brought bytes starts the count of failures anew.
                failures = 1 if position > begin else failures + 1
                if failures > FAILURES_MAX or not (position and version):
                    raise
            self._wait(FIRST_WAIT_S * 2 ** (failures - 1))

    @contextmanager
    def _request(
        self,
        method: str,
        url: str,
        field: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        within_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and keep its connection for the body of the block; it is cut after `within_s`."""
        checked = self.check(url, field)
        connection = _CheckedConnection(checked)
        timer = Timer(within_s or 0, lambda: _cut(connection))
        if within_s is not None:
            timer.start()
        try:
            query = f"?{checked.parts.query}" if checked.parts.query else ""
            target = (checked.parts.path or "/") + query
            connection.request(method, target, body, dict(headers))
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            message = f"{checked.parts.hostname}: {error}"
            raise TransportUnavailable(message) from error
        finally:
            timer.cancel()
            connection.close()

    def _is_listed(self, address: str) -> bool:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        return any(parsed in network for network in self._networks)


class _CheckedConnection(http.client.HTTPConnection):
    """A connection to the checked address; TLS and the header Host use the name of the URL."""

    def __init__(self, url: CheckedUrl) -> None:
        self._host = url.parts.hostname or ""
        self._address = (url.address, url.port)
        self._tls = ssl.create_default_context() if url.parts.scheme == "https" else None
        self.default_port = 80 if self._tls is None else 443
        super().__init__(self._host, url.port, timeout=TIMEOUT_S)

    @override
    def connect(self) -> None:
        self.sock = socket.create_connection(self._address, TIMEOUT_S)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._host)


def _cut(connection: http.client.HTTPConnection) -> None:
    """End reads and writes of another thread: a server that drips bytes never ends by itself."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


PIECE_BYTES: Final = 256 * 1024
"""Maximum bytes that are yielded at a time."""
FAILURES_MAX: Final = 4
"""Connections in a row that may bring nothing."""
FIRST_WAIT_S: Final = 0.5
"""Wait before the download continues, in seconds; doubles with each connection that brings nothing."""
_TRANSIENT: Final = frozenset({408, 425, 429})
_CHANGED: Final = frozenset({200, 206, 412, 416})


def _is_rest(response: http.client.HTTPResponse, position: int, size: int | None) -> bool:
    """Return whether a later response has the rest of the file."""
    whole = r"\d+" if size is None else size
    rest = rf"bytes {position}-\d+/({whole}|\*)"
    content_range = response.headers.get("Content-Range", "")
    return response.status == 206 and re.fullmatch(rest, content_range) is not None


def _refused(name: str, field: str, status: int) -> Exception:
    if status >= 500 or status in _TRANSIENT:
        return _broken(name, f"says {status}")
    return InvalidRequest.of(field, f"{name} says {status}")


def _broken(name: str, why: str) -> TransportUnavailable:
    return TransportUnavailable(f"{name}: {why}")


URL_FIELD: Final = "spec.input.url"


def check_url(url: str, prefixes: Sequence[str]) -> None:
    """Check that the operator lets a URL be read (`jobs.input_prefixes`).

    A prefix ends at a "/", whether it is written or not: "s3://prompts" does not cover
    "s3://prompts-private".

    Raises:
        InvalidRequest: it may not be read.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequest.of(URL_FIELD, "not a URL; send SCHEME://HOST/PATH") from error
    steps = unquote(parts.path).split("/")
    if not parts.scheme or "::" in url or ".." in steps or "\\" in url or parts.username:
        raise InvalidRequest.of(
            URL_FIELD, "not a plain URL; remove chained file systems, '..' and user names"
        )
    if not any(url.startswith(prefix.rstrip("/") + "/") for prefix in prefixes):
        listed = ", ".join(prefixes) or "none"
        raise InvalidRequest.of(
            URL_FIELD,
            f"not below any prefix that the operator allows (jobs.input_prefixes): {listed};"
            " upload the file instead",
        )


def read_url(url: str, prefixes: Sequence[str], outbound: Outbound) -> Generator[bytes]:
    """Yield the bytes behind a URL in pieces. Blocks.

    http and https go through `Outbound`; other schemes through fsspec, with the credentials and
    endpoints of this process's environment.

    Raises:
        InvalidRequest: it may not be read, is missing, or this process has no access; the message says what to do.
        TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
    """
    check_url(url, prefixes)
    if urlsplit(url).scheme in ("http", "https"):
        yield from outbound.read(url, URL_FIELD)
        return
    try:
        import fsspec

        options = _OPTIONS.get(urlsplit(url).scheme, {})
        files, path = fsspec.url_to_fs(url, **options)
        size, position = files.size(path), 0
        with files.open(path, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                position += len(piece)
                yield piece
        if size is not None and position != size:
            message = f"{url}: {position} of {size} bytes came"
            raise TransportUnavailable(message)
    except SluiceError:
        raise
    except Exception as error:  # fsspec's drivers raise what their libraries raise
        problem = f"{url}: {type(error).__name__}: {error}"
        if {kind.__name__ for kind in type(error).__mro__} & _TRANSIENT_ERRORS:
            raise TransportUnavailable(problem) from error
        hint = (
            "make it readable for the jobs process: the object, its credentials (AWS_ACCESS_KEY_ID, "
            "or a role), and the driver (`pip install 's3fs>=2025.3'` for S3)"
        )
        raise InvalidRequest.of(URL_FIELD, f"{problem}; {hint}") from error


_TRANSIENT_ERRORS: Final = frozenset(
    {
        "ConnectionError",
        "TimeoutError",
        "HTTPClientError",
        "ClientConnectionError",
        "ClientPayloadError",
    }
)
"""Names of errors of Python, botocore and aiohttp for connections that fail or break."""
_OPTIONS: Final[dict[str, dict[str, int]]] = {"s3": {"default_block_size": 8 << 20}}
