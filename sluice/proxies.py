"""Keep calls on this machine away from HTTP proxies.

Companies set `http_proxy` on every machine, often without `no_proxy`. gRPC, urllib, aiohttp, OpenTelemetry and
botocore then send calls to 127.0.0.1 to the proxy, which refuses them or calls itself.
"""

import os
from collections.abc import MutableMapping
from typing import Any, Final

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1", "[::1]")
"""Hosts as the variable `no_proxy` names them."""
DIRECT: Final[tuple[str, Any]] = ("grpc.enable_http_proxy", 0)
"""Option of a gRPC channel that uses no proxy."""

_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_BYPASSES: Final = ("no_proxy", "NO_PROXY")


def bypass_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add this machine to `no_proxy` where a proxy is set."""
    if not any(environment.get(name) or environment.get(name.upper()) for name in _PROXIES):
        return
    listed = [environment[name] for name in _BYPASSES if environment.get(name)]
    hosts = [host.strip() for one in listed for host in one.split(",") if host.strip()]
    for name in _BYPASSES:
        environment[name] = ",".join(dict.fromkeys((*hosts, *LOOPBACK_HOSTS)))
    if environment.get("no_grpc_proxy"):  # gRPC reads it instead
        environment["no_grpc_proxy"] += "," + ",".join(LOOPBACK_HOSTS)
