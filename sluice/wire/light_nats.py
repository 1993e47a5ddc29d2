"""Imports nats-py without aiohttp; a process of ours imports this module first.

nats-py speaks WebSocket where aiohttp is installed, and beside Triton's wheel it is. No process of ours does, and
aiohttp would take a fifth of the time of all their imports.
"""

import sys

if "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import nats.aio.transport  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
