"""The first import of gateways, batchers, `jobs` and remote workers: no core dumps, no proxy for loopback, silent gRPC.

gRPC's core logs a line for each broken handshake, as many as strangers like: it is silent unless GRPC_VERBOSITY is set.
"""

import gc
import os

from sluice.core_dumps import forbid_core_dumps
from sluice.proxies import bypass_loopback

# Collections during the imports find next to nothing and take a tenth of their time: there are none until
# `sluice.interpreter.freeze_heap`.
gc.disable()
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
bypass_loopback()
forbid_core_dumps()
