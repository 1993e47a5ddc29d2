"""Cores that engines share with the mesh's own processes, as on a machine that runs `sluice up`.

Everything with work gets an equal part of the cores, at most one core each: processor sharing. A
core is slower while others compute too, because they share caches and memory, or are hardware
threads of one core. The work is:

- a step of an engine, the part `Sharing.step_share` of it;
- `Sharing.request_s` for each request, half before the batcher has it and half after its end;
- `Sharing.report_s` for each report of a worker and `Sharing.token_s` for each streamed token in it.
  A worker has one report on its way at a time: steps that end meanwhile share the next one, as in
  `model_workers/sender.py`.

The seconds are processor times of a real mesh; `simulator/measured.py` fits what cannot be measured
alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

Action = Callable[[], None]


class EventQueue:
    """Virtual time: actions by their time; those of one time run in the order they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._added = 0

    def at(self, when: float, action: Action) -> None:
        """Run an action at a time, or now if that has passed."""
        self._added += 1
        heappush(self._heap, (max(self.now, when), self._added, action))

    def after(self, seconds: float, action: Action) -> None:
        """Run an action when this many seconds have passed."""
        self.at(self.now + seconds, action)

    def next_at(self) -> float | None:
        """Return when the next action is due; None without any."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Advance to the next action and run it."""
        self.now, _, action = heappop(self._heap)
        action()


@dataclass(slots=True)
class Alarm:
    """An action at the earliest time that was asked for since it last ran."""

    events: EventQueue
    action: Action
    _at: float = math.inf

    def set(self, at: float) -> None:
        """Run the action at a time, unless it runs before."""
        if at < self._at:
            self._at = at
            self.events.at(at, partial(self._ring, at))

    def _ring(self, at: float) -> None:
        # An earlier time replaces a later one, whose event then does nothing.
        if at == self._at:
            self._at = math.inf
            self.action()


@dataclass(frozen=True, slots=True)
class Sharing:
    """What runs on the shared cores, seconds of one core; see above.

    Attributes:
        slowdown: how much longer work takes while all cores are busy, a share of its time.
        step_share: of a step's time, what is computed on these cores: 1 on a CPU, 0 where another device computes.
    """

    cores: int
    request_s: float
    report_s: float
    token_s: float
    slowdown: float = 0.0
    step_share: float = 1.0

    def speed(self, busy: int) -> float:
        """Return the work that each of `busy` items gets done per second, in seconds of one core."""
        others = (min(busy, self.cores) - 1) / max(1, self.cores - 1)
        return min(1.0, self.cores / busy) / (1 + self.slowdown * others)


class Cores:
    """Processor sharing of the cores."""

    def __init__(self, sharing: Sharing, events: EventQueue) -> None:
        self.sharing = sharing
        self._events = events
        self._work: list[tuple[float, int, Action]] = []
        """Min-heap keyed by virtual finish time (processor sharing)."""
        self._added = self._plans = 0
        self._virtual_s = 0.0
        """Virtual time: the work that an item present since the start would have got done."""
        self._counted_at = 0.0

    def work(self, seconds: float, done: Action) -> None:
        """Do work of this many seconds of one core, then run `done`."""
        self._count()
        self._added += 1
        heappush(self._work, (self._virtual_s + seconds, self._added, done))
        self._plan()

    def _count(self) -> None:
        now = self._events.now
        if self._work:
            self._virtual_s += (now - self._counted_at) * self.sharing.speed(len(self._work))
        self._counted_at = now

    def _plan(self) -> None:
        self._plans += 1
        if self._work:
            left_s = (self._work[0][0] - self._virtual_s) / self.sharing.speed(len(self._work))
            self._events.after(left_s, partial(self._finish, self._plans))

    def _finish(self, plan: int) -> None:
        """Finish the first item, unless something was added or finished since."""
        if plan != self._plans:
            return  # The plan was made for another set of work; a newer event follows.
        self._count()
        self._virtual_s, _, done = heappop(self._work)
        self._plan()
        done()
