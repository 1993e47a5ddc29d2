"""How a client connects: address, options of the channel, metadata of a call."""

import math
import os
from typing import Final

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice.defaults import DEFAULT_ADDRESS, TENANT_METADATA
from sluice.errors import InvalidRequest

ADDRESS_VARIABLE: Final = "SLUICE_ADDRESS"

LOOKUP_S: Final = 10.0
"""How long counting tokens and listing models may take, seconds."""
LISTING_S: Final = 120.0
"""How long listing outcomes may take, which may be many, seconds."""

OPTIONS: Final = (
    # gRPC's own waits (1 s, growing to 120 s) would make our tries fail without a connection attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def resolve_address(address: str | None) -> str:
    """`address`, else what SLUICE_ADDRESS says, else the default."""
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS


def tenant_metadata(tenant: str | None) -> tuple[tuple[str, str], ...]:
    """What names the tenant; empty without one."""
    return () if tenant is None else ((TENANT_METADATA, tenant),)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current OpenTelemetry span as W3C headers; empty without one."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def check_timeout(timeout_s: float | None) -> None:
    """Says no to what is no length of time; what is over already fails as a deadline.

    Raises:
        InvalidRequest: it is not a number, or infinite.
    """
    if timeout_s is not None and not math.isfinite(timeout_s):
        raise InvalidRequest.of("timeout_s", f"{timeout_s} is not a number of seconds")
