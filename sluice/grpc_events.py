"""gRPC's events reach the event loop of a busy process all at once.

grpc.aio has a thread that wakes the loop with a byte on a socket pair for each event. The loop reads one byte a turn
and takes all events that are there, so a busy one leaves bytes behind. At 278 the pair is full: the thread waits in its
write, and each turn of the loop brings one event until nothing is left to do. Of thousands of calls at once the last
ones waited many seconds, with the processor half idle. A write that does not wait loses nothing: a full pair wakes the
loop in any case.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from grpc import aio


@contextmanager
def prompt_grpc_events() -> Iterator[None]:
    """Apply to the whole life of the running event loop; enter it before anything of `grpc.aio` is made."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0)  # the pair that is made now does not block
    try:
        aio.init_grpc_aio()
    finally:
        socket.setdefaulttimeout(timeout_s)
    try:
        yield
    finally:
        aio.shutdown_grpc_aio()
