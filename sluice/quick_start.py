"""The first import of every process: no core dumps, no proxy for calls on this machine, a silent gRPC core.

gRPC's core logs a line for each broken handshake, as many as strangers like: it is silent unless GRPC_VERBOSITY is set.
"""

import os

import sluice.interpreter  # noqa: F401  # before all other imports
from sluice.core_dumps import forbid_core_dumps
from sluice.proxies import bypass_loopback

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
bypass_loopback()
forbid_core_dumps()
