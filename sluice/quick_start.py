"""The first import of every process: no core dumps, nats-py without aiohttp, no garbage collected until `freeze_heap`.

Calls on this machine use no HTTP proxy.

gRPC's core logs a line for each broken handshake, as many as strangers like: it is silent unless GRPC_VERBOSITY is set.

Collections during the imports find next to nothing, and take a tenth of their time.
"""

import gc
import os

import sluice.wire.light_nats  # noqa: F401
from sluice.core_dumps import forbid_core_dumps
from sluice.proxies import bypass_loopback

gc.disable()
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
bypass_loopback()
forbid_core_dumps()
