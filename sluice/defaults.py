"""What a client and a gateway agree on without a message. Imports nothing, so that a client starts fast."""

from collections.abc import Mapping
from typing import Final

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Where the gateway listens."""

DEFAULT_HTTP_ADDRESS: Final = "127.0.0.1:8000"
"""Where the gateway of `sluice up` listens for HTTP."""

AUTO: Final = "auto"
"""The model name that means: route."""

TENANT_METADATA: Final = "sluice-tenant"
"""gRPC metadata that names the tenant where the gateway asks for no credentials."""

ALL_TENANTS_METADATA: Final = "sluice-all-tenants"
"""Metadata from a gateway to `jobs`: the caller may see or change the jobs of every tenant."""

KEY_METADATA: Final = "sluice-key-id"
"""Metadata between a gateway and `jobs`: the id of the API key that made a job, and whose limits its items have."""

CALLER: Final = "caller"
OPERATOR: Final = "operator"
AUDITOR: Final = "auditor"
ROLES: Final = (CALLER, OPERATOR, AUDITOR)
"""What an API key or a token allows; docs/operate/security.md."""

LABELS_MAX: Final = 32
LABEL_KEY_CHARS_MAX: Final = 64
LABEL_VALUE_CHARS_MAX: Final = 512
"""Most labels of a request or job, and most characters of a key and of a value. Items have the labels of their job."""
LABELS_BYTES_MAX: Final = 16 * 1024
"""Keys and values of all labels together, as UTF-8: they are kept with every record, audit entry and job."""


def labels_bytes(labels: Mapping[str, str]) -> int:
    """Return the size that `LABELS_BYTES_MAX` limits."""
    return sum(len(key.encode()) + len(value.encode()) for key, value in labels.items())
