"""When messages to batchers leave: at the end of a turn of the event loop, or a moment later, to share their cost.

The latency budget (docs/internals/wire.md, Latency budget) lists every delay of the mesh; these are the gateway's.
"""

import asyncio
import time
from collections import deque
from math import inf
from typing import Final

from gateway.streaming.model_run import ModelRun
from sluice.wire.subjects import BULK_CLASS, URGENT_CLASS

UNREAD_S: Final = 0.025
"""Maximum delay of a bulk task whose answer nobody reads in parts, in seconds. Items of jobs then leave together, which
costs NATS and the batcher less, and such an answer takes seconds."""
UNREAD_MS: Final = 1000
"""Nobody reads parts of an answer whose tokens are coalesced for longer than this, in milliseconds."""
INTERACTIVE_S: Final = 0.01
"""Maximum delay of an interactive task in a busy gateway, in seconds. Tasks that leave together share a batch and a
step of the engine, which costs all processes less."""
FREQUENT: Final = 9
"""Interactive tasks within `FREQUENT_S` from which on they wait for each other; a slower stream gains nothing."""
FREQUENT_S: Final = 4 * INTERACTIVE_S
LAG_S: Final = 0.001
"""Delay of the event loop from which on the gateway is busy, in seconds: others compute on its cores too."""
BUSY_S: Final = 1.0
"""How long a gateway counts as busy after such a delay, in seconds."""


class Coalescer:
    """Signals to the one task that sends messages when they are due."""

    def __init__(self) -> None:
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        """When the timer signals, on the loop's clock."""
        self._busy_until = -inf
        self._recent = deque([-inf], FREQUENT)
        """When the last interactive tasks came while the gateway was busy."""
        self._leave_at = -inf
        """When the last interactive tasks left, or leave."""

    def note_lag(self, lag_s: float) -> None:
        """Note how much later than it should the event loop came."""
        if lag_s > LAG_S:
            self._busy_until = time.monotonic() + BUSY_S

    def notify(self, run: ModelRun | None = None) -> None:
        """Signal that there is a message: the task of a run, or one that is due with the next turn of the loop."""
        delay_s = 0.0 if run is None else self._delay_s(run)
        if delay_s <= 0:
            self._is_due.set()
        if self._is_due.is_set():
            return
        loop = asyncio.get_running_loop()
        due_at = loop.time() + delay_s
        if due_at < self._timer_at:
            self._stop_timer()
            self._timer, self._timer_at = loop.call_later(delay_s, self._is_due.set), due_at

    async def wait(self) -> None:
        """Return when messages are due."""
        await self._is_due.wait()
        self._is_due.clear()
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf

    def _delay_s(self, run: ModelRun) -> float:
        priority_class = run.run_class.priority_class
        if priority_class == URGENT_CLASS:
            return self._interactive_delay_s(time.monotonic())
        is_unread = priority_class == BULK_CLASS and run.task.coalesce_ms > UNREAD_MS
        return UNREAD_S if is_unread else 0.0

    def _interactive_delay_s(self, now: float) -> float:
        if now < self._busy_until:
            self._recent.append(now)
        if now - self._recent[0] >= FREQUENT_S:
            return 0.0
        if now >= self._leave_at:
            self._leave_at = max(self._leave_at + INTERACTIVE_S, now)
        return self._leave_at - now
