"""Metadata of calls."""

from collections.abc import Mapping
from typing import Any


def metadata_of(context: Any) -> Mapping[str, str]:
    """The text entries of a call's metadata; the trace context is among them."""
    entries = context.invocation_metadata() or ()
    return {key: value for key, value in entries if isinstance(value, str)}
