"""What a client and a gateway agree on without a message. Without imports, so that a client starts fast."""

from typing import Final

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Where the gateway listens."""

AUTO: Final = "auto"
"""The model name that means: route."""

HIDDEN_TOKEN_ID: Final = 0xFFFF_FFFF
"""Stands in an answer for a token whose text the output filter did not show."""

TENANT_METADATA: Final = "sluice-tenant"
"""gRPC metadata that names the tenant where nobody has to prove who they are."""
