"""HTTP to URLs that callers chose: webhooks and inputs. They never reach addresses that only this network reaches.

A name is resolved once, every address behind it is checked, and the connection goes to an address that was checked: a
name that is resolved again could mean another machine by then. Redirects are not followed.
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

from jobs.download import Download
from sluice.errors import InvalidRequest, TransportUnavailable

TIMEOUT_S: Final = 10.0
"""The limit of connecting, and of each read or write, seconds."""
POST_S: Final = 20.0
"""The limit of a whole call with an answer, seconds."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_LEADING_AWAY: Final = tuple(
    map(ipaddress.IPv6Network, ("2001::/23", "2002::/16", "2001:db8::/32", "3fff::/20"))
)
_FOR_PROTOCOLS: Final = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))

Resolve = Callable[[str, int], Sequence[str]]
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def resolve(host: str, port: int) -> list[str]:
    """The numeric addresses of a name.

    Raises:
        OSError: there are none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(where[0]) for *_, where in found]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checked URL leads: its parts, and the address to connect to."""

    parts: SplitResult
    port: int
    address: str


def is_public(address: _Address) -> bool:
    """Whether everybody on the Internet reaches ``address`` as itself (IANA's registries of special addresses).

    Of IPv6 only 2000::/3 is in use for that; of it 6to4, Teredo and ORCHID lead elsewhere or nowhere. Addresses that
    stand for others (IPv4-mapped, NAT64, site-local) lead to what a gateway of this network makes of them.
    """
    if isinstance(address, ipaddress.IPv6Address):
        in_use = address in _GLOBAL_UNICAST and not any(address in one for one in _LEADING_AWAY)
        return in_use and address.is_global
    return (
        address.is_global
        and not address.is_multicast
        and not any(address in one for one in _FOR_PROTOCOLS)
    )


class Outbound:
    """Opens URLs, of which those at private addresses only where the operator lists them.

    Args:
        allowed: names of hosts and networks ("10.1.0.0/16", "127.0.0.1") that may be reached though they are private,
            over http too.
        resolve: the addresses of a name.
        wait: waits for so many seconds before a download that broke continues.
    """

    def __init__(
        self,
        allowed: Sequence[str] = (),
        resolve: Resolve = resolve,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._resolve, self._wait = resolve, wait
        self._networks: list[_Network] = []
        self._hosts: set[str] = set()
        for one in allowed:
            try:
                self._networks.append(ipaddress.ip_network(one, strict=False))
            except ValueError:
                self._hosts.add(one.lower())

    def check(self, url: str, field: str) -> Target:
        """Where ``url`` leads.

        Raises:
            InvalidRequest: it is no URL that may be opened; names ``field``.
            TransportUnavailable: its name cannot be resolved now.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise InvalidRequest.of(field, "is no URL; send https://HOST/PATH") from error
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidRequest.of(field, "is no http or https URL")
        if parts.username is not None or any(char <= " " or char > "~" for char in url):
            raise InvalidRequest.of(field, "has a user, white space, or what is not ASCII")
        listed = host in self._hosts
        try:
            addresses = self._resolve(host, port)
        except UnicodeError as error:  # of a label without letters, or with over 63
            raise InvalidRequest.of(field, f"{host} is no name of a host") from error
        except OSError as error:
            raise TransportUnavailable(f"{host} cannot be resolved", retry_after_s=1.0) from error
        for address in addresses:
            if not (listed or self._may(address)):
                raise InvalidRequest.of(
                    field,
                    f"{host} is at {address}, which is private; the operator has not listed it",
                )
        if parts.scheme == "http" and not (listed or self._is_listed(addresses[0])):
            raise InvalidRequest.of(
                field, "is not https; http needs a host that the operator lists"
            )
        return Target(parts, port, addresses[0])

    def post(self, url: str, headers: Mapping[str, str], body: bytes, field: str) -> int:
        """Sends ``body``; the status of the answer.

        Raises:
            InvalidRequest: as of `check`.
            TransportUnavailable: there was no answer.
        """
        target = self.check(url, field)
        with _connected(target, POST_S) as connection:
            connection.request("POST", _path(target), body, dict(headers))
            return connection.getresponse().status

    def read(self, url: str, field: str) -> Generator[bytes]:
        """Yield the bytes behind ``url`` in pieces: all of them, whatever connections break.

        Raises:
            InvalidRequest: as of `check`, or the server does not give them.
            TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
        """
        name = self.check(url, field).parts.netloc
        yield from Download(partial(self._get, url, field), name, field, self._wait).pieces()

    @contextmanager
    def _get(
        self, url: str, field: str, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        target = self.check(url, field)
        with _connected(target) as connection:
            connection.request("GET", _path(target), headers=dict(headers))
            yield connection.getresponse()

    def _may(self, address: str) -> bool:
        found = ipaddress.ip_address(address.partition("%")[0])
        return is_public(found) or self._is_listed(address)

    def _is_listed(self, address: str) -> bool:
        found = ipaddress.ip_address(address.partition("%")[0])
        return any(found in network for network in self._networks)


@contextmanager
def _connected(
    target: Target, within_s: float | None = None
) -> Iterator[http.client.HTTPConnection]:
    """A connection to the checked address; TLS and the header Host have the name. ``within_s``: it is cut then."""
    host = target.parts.hostname or ""
    connection: http.client.HTTPConnection
    if target.parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            host, target.port, timeout=TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, target.port, timeout=TIMEOUT_S)
    to = (target.address, target.port)
    # The hook by which http.client opens its socket; TLS is wrapped around it afterwards, for the name.
    connection._create_connection = lambda _, *rest: socket.create_connection(to, *rest)  # type: ignore[attr-defined]
    timer = Timer(within_s or 0, lambda: _cut(connection))
    if within_s is not None:
        timer.start()
    try:
        yield connection
    except (OSError, http.client.HTTPException) as error:
        raise TransportUnavailable(f"{host}: {error}", retry_after_s=1.0) from error
    finally:
        timer.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """Ends what another thread reads or writes there: a server that sends a byte now and then never ends by itself."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _path(target: Target) -> str:
    path = target.parts.path or "/"
    return f"{path}?{target.parts.query}" if target.parts.query else path
