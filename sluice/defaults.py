"""What a client and a gateway assume when nobody says otherwise. Without imports, so that a client starts fast."""

from typing import Final

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Where the gateway listens."""

AUTO: Final = "auto"
"""The model name that means: route."""
