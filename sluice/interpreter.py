"""Settings of the interpreter that keep the event loop of a process prompt (decision 0017).

Gateways, batchers, `jobs` and remote workers import `sluice.quick_start` first, which turns the collector off until
`freeze_heap`; workers in Triton only freeze their heap.
"""

import gc
import sys
from typing import Final

GC_THRESHOLDS: Final = 700, 2, 100
"""Thresholds of the garbage collector, in objects and collections of the younger generation. A gateway with 512 items
of a job has 40,000 objects that are younger than `freeze_heap`; with Python's own thresholds (700, 10, 10) collecting
them stops the loop for tens of milliseconds each second."""
SWITCH_S: Final = 0.0005
"""How long a thread keeps the interpreter while another one waits for it, in seconds. Python's own 5 ms pass each time
that the event loop wakes up beside a thread that inspects a long text."""


def switch_threads_soon() -> None:
    """Give a thread that waits for the interpreter a turn after `SWITCH_S`; call it once, at the start."""
    sys.setswitchinterval(SWITCH_S)


def freeze_heap() -> None:
    """Exempt everything allocated so far from garbage collection; call it once, when the process is ready.

    Rules, models and modules live as long as the process. A full collection that scans them stops the event loop for
    tens of milliseconds.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
