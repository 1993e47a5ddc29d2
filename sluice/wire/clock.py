"""Clocks that cross a wire. Inside a process time is monotonic seconds; on a wire it is Unix milliseconds."""

import time


def unix_ms() -> int:
    """Now, milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000
