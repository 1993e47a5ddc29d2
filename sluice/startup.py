"""What servers need at their start: addresses, free ports, who holds a port that is not free, and a quiet heap."""

import errno
import gc
import ipaddress
import random
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from sluice.errors import SetupError

LOOPBACK: Final = "127.0.0.1"
_LOWEST: Final = 15_000
_TRIES: Final = 200


def split_address(address: str, key: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[V6]:PORT``; ``key`` names the setting in the error.

    Raises:
        SetupError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise SetupError(f"{key}: {address!r} is not HOST:PORT; write for example {LOOPBACK}:50051")
    return host, int(port)


def free_port(host: str = LOOPBACK, taken: Collection[int] = ()) -> int:
    """A port that nobody listens on and that the kernel gives to no outgoing connection.

    A server that is restarted needs its port again. A port of the ephemeral range may by then belong to the outgoing
    connection of some client, even of one that is trying to reach this very port; so the port comes from below it.

    Raises:
        SetupError: every port tried is in use.
    """
    candidates = range(_LOWEST, max(_ephemeral_start(), _LOWEST + 1_000))
    for port in random.sample(candidates, _TRIES):
        if port not in taken and listen_problem(host, port) is None:
            return port
    raise SetupError(f"no free port on {host} from {candidates.start} to {candidates.stop}")


def listen_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen on ``host:port``, in words that follow "is ..."; None when it can."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except socket.gaierror:
        return "not an address of this machine"
    except OSError as error:
        return _bind_problem(error, port)
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody accepts connections on ``host:port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def freeze_heap() -> None:
    """Exempts everything allocated so far from garbage collection; call it once, when the process is ready.

    Rules, models and modules live as long as the process. A full collection that scans them stops the event loop for
    tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


def _bind_problem(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        return f"in use by {holder}" if holder else "in use by another process"
    if error.errno == errno.EADDRNOTAVAIL:
        return "not an address of this machine"
    if error.errno == errno.EACCES:
        return "a port that needs more rights"
    return f"not usable ({error.strerror})"


def _holder(port: int) -> str | None:
    """Name and pid of who listens on ``port``, as far as this user may know."""
    import psutil  # only to word an error: clients and containers do without it

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.pid is None:
                continue
            if connection.laddr and connection.laddr.port == port:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return None


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
