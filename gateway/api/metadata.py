"""Metadata of calls, and where they come from."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from sluice.startup import is_loopback

GUARDS_S: Final = 60.0


def metadata_of(context: Any) -> Mapping[str, str]:
    """The text entries of a call's metadata; the trace context is among them."""
    entries = context.invocation_metadata() or ()
    return {key: value for key, value in entries if isinstance(value, str)}


def timeout_of(context: Any) -> float:
    """How long a call may wait for guard models that has no deadline of its own kind, seconds."""
    remaining = context.time_remaining()
    return GUARDS_S if remaining is None else min(float(remaining), GUARDS_S)


def host_of(peer: str) -> str:
    """The address of the caller; ``peer`` as gRPC names it, "ipv4:HOST:PORT"."""
    kind, _, address = unquote(peer).partition(":")
    return kind if kind == "unix" else address.rpartition(":")[0].strip("[]")


def is_local(peer: str) -> bool:
    """Whether the caller runs on this machine; ``peer`` as in `host_of`."""
    host = host_of(peer)
    return host == "unix" or is_loopback(host)
