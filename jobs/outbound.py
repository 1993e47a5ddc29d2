"""HTTP to URLs that callers chose: webhooks and inputs. They never reach private addresses.

A name is resolved once, every address behind it is checked, and the connection goes to a checked
address: a second resolution could return another machine. Redirects are not followed.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Timer
from typing import Final
from urllib.parse import SplitResult, urlsplit

from typing_extensions import override

from jobs.download import Download
from sluice.errors import InvalidRequest, TransportUnavailable

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
        """Return where a URL leads.

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
            raise TransportUnavailable(f"{host} cannot be resolved", retry_after_s=1.0) from error
        # Every address counts: the resolver may order them differently next time.
        for address in addresses:
            if not (listed or self._may(address)):
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
        checked = self.check(url, field)
        with _connected(checked, self._post_s) as connection:
            connection.request("POST", _path(checked), body, dict(headers))
            return connection.getresponse().status

    def read(self, url: str, field: str) -> Generator[bytes]:
        """Yield all bytes behind a URL in pieces, even if connections break.

        Raises:
            InvalidRequest: as for `check`, or the server refuses.
            TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
        """
        name = self.check(url, field).parts.netloc
        yield from Download(partial(self._get, url, field), name, field, self._wait).pieces()

    @contextmanager
    def _get(
        self, url: str, field: str, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        checked = self.check(url, field)
        with _connected(checked) as connection:
            connection.request("GET", _path(checked), headers=dict(headers))
            yield connection.getresponse()

    def _may(self, address: str) -> bool:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        return is_public(parsed) or self._is_listed(address)

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


@contextmanager
def _connected(
    url: CheckedUrl, within_s: float | None = None
) -> Iterator[http.client.HTTPConnection]:
    """Open a connection for the body of the block; it is cut after `within_s`."""
    connection = _CheckedConnection(url)
    timer = Timer(within_s or 0, lambda: _cut(connection))
    if within_s is not None:
        timer.start()
    try:
        yield connection
    except (OSError, http.client.HTTPException) as error:
        raise TransportUnavailable(f"{url.parts.hostname}: {error}", retry_after_s=1.0) from error
    finally:
        timer.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """End reads and writes of another thread: a server that drips bytes never ends by itself."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _path(checked: CheckedUrl) -> str:
    path = checked.parts.path or "/"
    return f"{path}?{checked.parts.query}" if checked.parts.query else path
