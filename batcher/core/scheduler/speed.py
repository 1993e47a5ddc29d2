"""Speed of workers, and when their slots become free. Expected waits are computed from both.

Speeds are measured by class, on requests during whose time in the worker all granted capacity was
used for at least `FULL_SHARE`. A worker with few requests is faster, and a short request that
waited behind long ones says nothing about rates. A speed that was not measured for `MEMORY_S`
counts as unknown, so that no measurement outlasts an idle night.

A slot is the place of one request in a worker. It becomes free when the request has had the time
that its class needs for its prompt and expected answer.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from batcher.core.scheduler.entry import QueueEntry
from sluice.wire.subjects import CLASSES, RANKS

REQUESTS_MIN: Final = 4
"""Requests of a class that must be measured before its speed counts as known."""
MEMORY_S: Final = 120.0
"""Age of the newest measurement beyond which a speed counts as unknown, in seconds."""
FULL_SHARE: Final = 0.5
"""Share of a request's time in the worker during which all granted capacity must have been used."""
FADE: Final = 0.95
"""Weight of all earlier requests beside the newest one: about the last 20 count."""
RIDGE: Final = 0.01
"""Pull of the slope towards 0, relative to the squared mean: prompts of one length say nothing
about other lengths."""
SLOTS_MAX: Final = 64
"""Slots that are simulated individually; more are represented by this many."""
HALVINGS: Final = 14
"""Bisection steps of a wait: its error is below 1/16,000 of the interval."""
OCCUPANCY_S: Final = 20.0
"""Time constant of the mean occupancy of slots by class, in seconds; a burst of a few seconds is no
steady load."""


class _Line:
    """Line fitted to points by least squares; recent points weigh most."""

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
        """Intercept and slope, neither below 0."""
        n, x, y = self._n, self._x, self._y
        if not n or not x:
            return (y / n if n else 0.0), 0.0
        spread = self._xx - x * x / n + RIDGE * x * x / n
        slope = min(max(0.0, (self._xy - x * y / n) / spread), y / x)
        return (y - slope * x) / n, slope


class ClassSpeed:
    """Time that requests of one class take in a worker.

    Attributes:
        base_s: seconds until the first token, without the prompt.
        prompt_token_s: seconds until the first token, per prompt token.
        token_s: seconds per answer token after the first.
    """

    def __init__(self) -> None:
        self.base_s = self.prompt_token_s = self.token_s = 0.0
        self._first = _Line()
        self._tokens = self._seconds = 0.0
        self._requests = 0
        self._measured_at = -math.inf

    def is_old(self, now: float) -> bool:
        """Return whether nothing was measured lately."""
        return self._measured_at + MEMORY_S <= now

    def is_known(self, now: float) -> bool:
        """Return whether enough requests were measured, some of them lately."""
        return self._requests >= REQUESTS_MIN and not self.is_old(now)

    def add(
        self, prompt_tokens: int, first_s: float, tokens: int, rest_s: float, now: float
    ) -> None:
        """Add a measured request.

        Args:
            prompt_tokens: tokens computed before the first new one.
            first_s: seconds until the first token.
            tokens: further tokens.
            rest_s: seconds for these.
            now: monotonic seconds.
        """
        self._requests += 1
        self._measured_at = now
        self._first.add(prompt_tokens, first_s)
        self.base_s, self.prompt_token_s = self._first.coefficients
        if tokens > 0:
            self._tokens = self._tokens * FADE + tokens
            self._seconds = self._seconds * FADE + rest_s
            self.token_s = self._seconds / self._tokens

    def time_s(self, requests: float, prompt_tokens: float, answer_tokens: float) -> float:
        """Return how long requests with these totals occupy a slot, one after the other."""
        first_s = requests * self.base_s + prompt_tokens * self.prompt_token_s
        return first_s + max(0.0, answer_tokens - requests) * self.token_s


class Speeds:
    """Speeds of all classes of a model, and the full-capacity clock.

    Attributes:
        is_full: whether all granted capacity is used.
    """

    def __init__(self) -> None:
        self.is_full = False
        self._classes: dict[str, ClassSpeed] = {}
        self._full_s = 0.0
        self._watched_at = 0.0
        self._tokens = self._seconds = 0.0

    def watch(self, now: float, *, is_full: bool) -> None:
        """Record whether all granted capacity is used from now on."""
        self._full_s, self._watched_at = self._full_until(now), now
        self.is_full = is_full

    def begin(self, entry: QueueEntry, now: float) -> None:
        """Record that a request was handed out."""
        entry.full_s = self._full_until(now)

    def end(self, entry: QueueEntry, tokens: int, decode_s: float, now: float) -> None:
        """Measure a request that ended by itself with `tokens` new tokens, the first of them `decode_s` ago."""
        took_s = now - entry.sent_at
        if took_s <= 0 or self._full_until(now) - entry.full_s < FULL_SHARE * took_s:
            return
        rest_s = min(decode_s, took_s) if tokens > 1 else 0.0
        speed = self._classes.get(entry.priority_class)
        if speed is None or speed.is_old(now):
            speed = self._classes[entry.priority_class] = ClassSpeed()
        speed.add(entry.prefill_tokens, took_s - rest_s, tokens - 1, rest_s, now)
        self._tokens = self._tokens * FADE + entry.prefill_tokens + tokens
        self._seconds = self._seconds * FADE + took_s

    def of_class(self, name: str, now: float) -> ClassSpeed | None:
        """Return the speed of a class, or None while it is unknown."""
        speed = self._classes.get(name)
        return speed if speed is not None and speed.is_known(now) else None

    def tokens_per_s(self, slots: int, now: float) -> float:
        """Return the prompt and answer tokens that this many slots compute per second; 0 while unknown."""
        is_known = any(speed.is_known(now) for speed in self._classes.values())
        return slots * self._tokens / self._seconds if is_known else 0.0

    def _full_until(self, now: float) -> float:
        return self._full_s + (max(0.0, now - self._watched_at) if self.is_full else 0.0)


class Occupancy:
    """Mean number of slots that each class took lately."""

    def __init__(self) -> None:
        self._requests = dict.fromkeys(CLASSES, 0)
        self._means = dict.fromkeys(CLASSES, 0.0)
        self._at = 0.0

    def add(self, priority_class: str, requests: int) -> None:
        """Count requests sent to a worker, or those that left it with a negative number."""
        self._requests[priority_class] += requests

    def watch(self, now: float) -> None:
        """Advance the means to `now`."""
        fade = math.exp(-max(0.0, now - self._at) / OCCUPANCY_S)
        for name, requests in self._requests.items():
            self._means[name] = fade * self._means[name] + (1 - fade) * requests
        self._at = now

    def before(self, priority_class: str) -> float:
        """Return the mean number of slots that more urgent classes take."""
        return sum(self._means[name] for name in CLASSES[: RANKS[priority_class]])


class Slots:
    """Slots of workers by when each becomes free, in seconds from now."""

    def __init__(self, free_in_s: Iterable[float]) -> None:
        free = sorted(free_in_s)
        self._slots = len(free)
        self._share = min(1.0, SLOTS_MAX / len(free)) if free else 1.0
        step = 1 / self._share
        self._free = [free[int(place * step)] for place in range(min(len(free), SLOTS_MAX))]

    def __len__(self) -> int:
        return self._slots

    def wait_s(self, requests: float, service_s: float) -> float:
        """Return how long a request waits for a slot, in seconds.

        Args:
            requests: how many go before it, each to the slot that is free first.
            service_s: how long each of them occupies its slot.
        """
        free, before = self._free, math.ceil(requests * self._share - 1e-9)
        if not free:
            return 0.0
        if service_s <= 0:
            return free[0]
        low, high = free[0], free[min(before, len(free) - 1)] + before // len(free) * service_s
        # Slot i becomes free at free[i] + m * service_s. Bisect for the time by which more slots
        # have become free than requests go before.
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            passed = bisect_left(free, middle + 1e-9)
            turns = sum(int((middle - at) / service_s + 1e-9) + 1 for at in free[:passed])
            low, high = (low, middle) if turns > before else (middle, high)
        return high
