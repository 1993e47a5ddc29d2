"""How fast workers compute rows, and when their slots become free: expected waits are made of both.

Speeds are measured by class, of rows that were in a worker while all granted capacity was used for at least half of
their time. A worker with few rows is faster, and one short row that waited behind long ones says nothing about rates.
What was not measured for `MEMORY_S` is not known any more, so nothing measured once outlasts an idle night.

A slot is the place of one row in a worker. The rows in workers say when slots become free: each has the time that its
class takes for its prompt and its expected answer, less the time since it was sent.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from batcher.core.scheduler.task import QueuedTask
from sluice.wire.subjects import CLASSES, RANKS

ROWS_MIN: Final = 4
"""Rows of a class that must have been measured before its speed is known."""
MEMORY_S: Final = 120.0
"""Age of the newest measurement beyond which a speed is not known any more, seconds."""
FULL_SHARE: Final = 0.5
"""Share of a row's time in the worker during which all granted capacity must have been used."""
FADE: Final = 0.95
"""Weight of all earlier rows beside the newest one: about the last 20 rows count."""
RIDGE: Final = 0.01
"""Pull of the slope towards 0, relative to the squared mean: prompts of one length say nothing about other lengths."""
SLOTS_MAX: Final = 64
"""Slots that are looked at one by one; more are represented by so many of them."""
HALVINGS: Final = 14
"""Halvings of the interval that a wait is searched in: its error is below 1/16,000 of the interval."""
OCCUPANCY_S: Final = 20.0
"""Memory of the slots that each class takes, in seconds: a burst of a few seconds is no steady load."""
PEAK_S: Final = 10.0
"""How long the largest number of rows in workers is remembered, seconds."""


class _Line:
    """A line through points, fitted by least squares; recent points weigh most."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self._n = self._n * FADE + 1
        self._x = self._x * FADE + x
        self._y = self._y * FADE + y
        self._xx = self._xx * FADE + x * x
        self._xy = self._xy * FADE + x * y

    @property
    def coefficients(self) -> tuple[float, float]:
        """Intercept and slope, none of them below 0."""
        n, x, y = self._n, self._x, self._y
        if not n or not x:
            return (y / n if n else 0.0), 0.0
        spread = self._xx - x * x / n + RIDGE * x * x / n
        slope = min(max(0.0, (self._xy - x * y / n) / spread), y / x)
        return (y - slope * x) / n, slope


class RowSpeed:
    """How long rows of one class take in a worker.

    Attributes:
        base_s: seconds until the first token, without the prompt.
        prompt_token_s: seconds until the first token for each token of the prompt.
        token_s: seconds for each token of the answer after the first one.
    """

    def __init__(self) -> None:
        self.base_s = self.prompt_token_s = self.token_s = 0.0
        self._first = _Line()
        self._tokens = self._seconds = 0.0
        self._rows = 0
        self._measured_at = -math.inf

    def is_old(self, now: float) -> bool:
        """Whether nothing was measured lately."""
        return self._measured_at + MEMORY_S <= now

    def is_known(self, now: float) -> bool:
        """Whether enough rows were measured, some of them lately."""
        return self._rows >= ROWS_MIN and not self.is_old(now)

    def add(
        self, prompt_tokens: int, first_s: float, tokens: int, rest_s: float, now: float
    ) -> None:
        """Add a row: the seconds until its first token, and those for ``tokens`` further ones."""
        self._rows += 1
        self._measured_at = now
        self._first.add(prompt_tokens, first_s)
        self.base_s, self.prompt_token_s = self._first.coefficients
        if tokens > 0:
            self._tokens = self._tokens * FADE + tokens
            self._seconds = self._seconds * FADE + rest_s
            self.token_s = self._seconds / self._tokens

    def time_s(self, rows: float, prompt_tokens: float, answer_tokens: float) -> float:
        """Return the time that ``rows`` of so many tokens in all keep a slot, one after the other."""
        first_s = rows * self.base_s + prompt_tokens * self.prompt_token_s
        return first_s + max(0.0, answer_tokens - rows) * self.token_s


class Speeds:
    """The speeds of all classes of a model, and the clock of full capacity.

    Attributes:
        is_full: whether all granted capacity is used.
    """

    def __init__(self) -> None:
        self.is_full = False
        self._classes: dict[str, RowSpeed] = {}
        self._full_s = 0.0
        self._watched_at = 0.0
        self._tokens = self._seconds = 0.0

    def watch(self, now: float, *, is_full: bool) -> None:
        """Note whether all granted capacity is used from now on."""
        self._full_s, self._watched_at = self._full_until(now), now
        self.is_full = is_full

    def begin(self, task: QueuedTask, now: float) -> None:
        """Note that ``task`` was handed out."""
        task.full_s = self._full_until(now)

    def end(self, task: QueuedTask, tokens: int, decode_s: float, now: float) -> None:
        """Measure a row that has ended by itself with ``tokens`` new tokens, the first of them ``decode_s`` ago."""
        took_s = now - task.sent_at
        if took_s <= 0 or self._full_until(now) - task.full_s < FULL_SHARE * took_s:
            return
        rest_s = min(decode_s, took_s) if tokens > 1 else 0.0
        speed = self._classes.get(task.priority_class)
        if speed is None or speed.is_old(now):
            speed = self._classes[task.priority_class] = RowSpeed()
        speed.add(task.prefill_tokens, took_s - rest_s, tokens - 1, rest_s, now)
        self._tokens = self._tokens * FADE + task.prefill_tokens + tokens
        self._seconds = self._seconds * FADE + took_s

    def of_class(self, name: str, now: float) -> RowSpeed | None:
        """Return the speed of a class; None while it is not known."""
        speed = self._classes.get(name)
        return speed if speed is not None and speed.is_known(now) else None

    def tokens_per_s(self, slots: int, now: float) -> float:
        """Return the tokens, of prompts and answers, that so many slots compute a second; 0: not known."""
        is_known = any(speed.is_known(now) for speed in self._classes.values())
        return slots * self._tokens / self._seconds if is_known else 0.0

    def _full_until(self, now: float) -> float:
        return self._full_s + (max(0.0, now - self._watched_at) if self.is_full else 0.0)


class Peak:
    """The largest of the numbers that were seen in the last `PEAK_S` to twice as long."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._before = self._now = 0

    def see(self, number: int, now: float) -> None:
        """Take a number."""
        if now >= self._since + PEAK_S:
            is_gap = now >= self._since + 2 * PEAK_S
            self._before, self._now, self._since = (0 if is_gap else self._now), 0, now
        self._now = max(self._now, number)

    def most(self, now: float) -> int:
        """Return the largest number."""
        if now >= self._since + 2 * PEAK_S:
            return 0
        return self._now if now >= self._since + PEAK_S else max(self._before, self._now)


class Occupancy:
    """Slots that rows of each class have lately taken, in the mean."""

    def __init__(self) -> None:
        self._rows = dict.fromkeys(CLASSES, 0)
        self._means = dict.fromkeys(CLASSES, 0.0)
        self._at = 0.0

    def add(self, priority_class: str, rows: int) -> None:
        """Count rows that were sent to a worker, or with a negative number those that have left it."""
        self._rows[priority_class] += rows

    def watch(self, now: float) -> None:
        """Add the time since the last call."""
        fade = math.exp(-max(0.0, now - self._at) / OCCUPANCY_S)
        for name, rows in self._rows.items():
            self._means[name] = fade * self._means[name] + (1 - fade) * rows
        self._at = now

    def before(self, priority_class: str) -> float:
        """Return the slots that more urgent classes take in the mean."""
        return sum(self._means[name] for name in CLASSES[: RANKS[priority_class]])


class Slots:
    """Slots of workers by the time at which each becomes free, seconds from now."""

    def __init__(self, free_in_s: Iterable[float]) -> None:
        free = sorted(free_in_s)
        self._slots = len(free)
        self._share = min(1.0, SLOTS_MAX / len(free)) if free else 1.0
        step = 1 / self._share
        self._free = [free[int(place * step)] for place in range(min(len(free), SLOTS_MAX))]

    def __len__(self) -> int:
        return self._slots

    def wait_s(self, tasks: float, each_s: float) -> float:
        """Return the wait of a task for a slot.

        Args:
            tasks: how many go before it, each to the slot that is free first.
            each_s: how long each of them keeps its slot.
        """
        free, before = self._free, math.ceil(tasks * self._share - 1e-9)
        if not free:
            return 0.0
        if each_s <= 0:
            return free[0]
        low, high = free[0], free[min(before, len(free) - 1)] + before // len(free) * each_s
        # The slots are free at free[i] + m * each_s; what is searched is the time at which one more is than go before.
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            passed = bisect_left(free, middle + 1e-9)
            turns = sum(int((middle - at) / each_s + 1e-9) + 1 for at in free[:passed])
            low, high = (low, middle) if turns > before else (middle, high)
        return high
