"""How servers start: signals, addresses and ports, the command and environment of a process."""

import asyncio
import errno
import ipaddress
import os
import random
import signal
import socket
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from sluice.errors import SettingsError, SetupError
from sluice.proxies import bypass_loopback
from sluice.settings import Settings

LOOPBACK: Final = "127.0.0.1"
ENGINE_NICE: Final = "SLUICE_ENGINE_NICE"
"""The variable that tells a worker the CPU priority of its engine."""
_LOWEST: Final = 15_000
"""First port that servers may take; those of outgoing connections begin behind the last one."""
_OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES: Final = 200

_PROBLEMS: Final[Mapping[int, str]] = {
    errno.EADDRINUSE: "in use by another process",
    errno.EADDRNOTAVAIL: "not an address of this machine",
    errno.EACCES: "a port that needs more rights",
}
"""Why a port cannot be bound, in words that follow "is ..."."""
_ONE_THREAD: Final[Mapping[str, str]] = {
    # Spinning threads slow other busy processes 10 to 40 times; a worker sets its own number.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "GRPC_VERBOSITY": "NONE",  # of Triton too
}


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, on the running loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def split_address(address: str, key: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[V6]:PORT`; `key` names the setting in the error.

    Raises:
        SetupError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise SetupError(f"{key}: {address!r} is not HOST:PORT; write for example {LOOPBACK}:50051")
    return host, int(port)


def free_port(host: str = LOOPBACK, used_ports: Collection[int] = ()) -> int:
    """Return a port that is not in use and that the kernel does not give to outgoing connections.

    A server that is restarted needs its port again. A port of the ephemeral range may by then belong to the outgoing
    connection of some client, even of one that is trying to reach this very port; so the port comes from below it.

    Raises:
        SetupError: every port tried is in use.
    """
    outgoing = int(_OUTGOING.read_text().split()[0]) if _OUTGOING.exists() else 32_768
    candidates = range(_LOWEST, max(outgoing, _LOWEST + 1_000))
    for port in random.sample(candidates, _TRIES):
        if port not in used_ports and listen_problem(host, port) is None:
            return port
    raise SetupError(f"no free port on {host} from {candidates.start} to {candidates.stop}")


def listen_problem(host: str, port: int) -> str | None:
    """Return why a server cannot listen on `host:port`, in words that follow "is ..."; None if it can."""
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
        return _PROBLEMS.get(error.errno or 0) or f"not usable ({error.strerror})"
    return None


def listening_at(address: str, key: str, otherwise: str = "") -> tuple[str, int]:
    """Return host and port of `address`, where a server is about to listen; `otherwise` is the remedy in the error.

    Raises:
        SetupError: it is not HOST:PORT, is taken, or is none of this machine.
    """
    host, port = split_address(address, key)
    if problem := listen_problem(host, port):
        raise SetupError(f"{key}: {address} is {problem}; choose another{otherwise}")
    return host, port


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(settings: Settings, key: str, address: str) -> None:
    """Raise SettingsError if other machines reach callers' ports without encryption and identities.

    Raises:
        SettingsError: `address` can be reached from other machines, and one of them is missing.
        SetupError: `address` is not HOST:PORT.
    """
    host, _ = split_address(address, key)
    missing = []
    if settings.tls.serving is None and not settings.tls.embedded:
        missing.append("calls are not encrypted (section tls)")
    if not settings.identity.enabled:
        missing.append("callers do not say who they are (section identity)")
    if missing and not (settings.gateway.allow_remote or is_loopback(host)):
        raise SettingsError(
            f"{key}: {host} can be reached from other machines, and {' and '.join(missing)}; use {LOOPBACK}, "
            "or set gateway.allow_remote in a closed network"
        )


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a server accepts connections on `host:port`."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def reachable(address: str) -> str:
    """Return where to call a server that listens on `address`: loopback if it listens on every address."""
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK}:{port}" if host in ("0.0.0.0", "[::]") else address


def module_command(module: str, config: Path | None) -> tuple[str, ...]:
    """Return the command of one of our processes; modules of the working directory are not imported."""
    command = (sys.executable, "-P", "-m", module)
    return command if config is None else (*command, "--config", str(config))


def child_environment(*, keep_settings: bool = False) -> dict[str, str]:
    """Return the environment for a process that shares this machine with others.

    A child reads resolved settings from its file. So variables that override settings are left out, unless
    `keep_settings`: they are resolved already, and `SLUICE_NATS__PORT=0` must not undo that.
    """
    prefix, environment = str(Settings.model_config.get("env_prefix", "")), dict(_ONE_THREAD)
    for key, value in os.environ.items():
        section = key.upper().removeprefix(prefix).partition("__")[0].lower()
        is_setting = key.upper().startswith(prefix) and section in Settings.model_fields
        if keep_settings or not is_setting:
            environment[key] = value
    bypass_loopback(environment)
    root = str(Path(__file__).resolve().parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # A source tree that is not installed.
        parts = (root, environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    return environment
