"""Metadata of calls, and where they come from."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from sluice.startup import is_loopback


def metadata_of(context: Any) -> Mapping[str, str]:
    """The text entries of a call's metadata; the trace context is among them."""
    entries = context.invocation_metadata() or ()
    return {key: value for key, value in entries if isinstance(value, str)}


def is_local(peer: str) -> bool:
    """Whether the caller runs on this machine; ``peer`` as gRPC names it, "ipv4:HOST:PORT"."""
    kind, _, address = unquote(peer).partition(":")
    return kind == "unix" or is_loopback(address.rpartition(":")[0].strip("[]"))
