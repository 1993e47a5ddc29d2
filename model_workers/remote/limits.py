"""When a server may be called: its rate limits and its failures. Times are monotonic seconds.

A server that has reported a reached limit, or when to come back, gets nothing until then. One that has failed gets
nothing for a while that grows with each failure in succession. Meanwhile the worker reports that it is full, so that
tasks wait in the batcher, where others may overtake them or they find another worker.
"""

import math
import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 1.0
"""Upper bound of the pause after failures, in seconds."""
LIMIT_S: Final = 1.0
LIMIT_S_MAX: Final = 60.0
"""Upper bound of a pause that a server may ask for, in seconds."""

_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_COUNTED: Final = ("requests", "tokens")


class Gate:
    """Whether the server may be called.

    Attributes:
        open_at: The server is not called before.
        free_at: When it accepts requests by its own report, which may be later.
        failures: Number of failures in succession.
    """

    def __init__(self) -> None:
        self.open_at = self.free_at = -math.inf
        self.failures = 0

    def answered(self, headers: Mapping[str, str], now: float) -> None:
        """Record an accepted request; its `headers` may say that it was the last one for now."""
        self.failures = 0
        waits = [_exhausted_s(headers, what) for what in _COUNTED]
        self._close(max(waits), now)

    def limited(self, retry_after_s: float | None, now: float) -> None:
        """Record a request that was refused because of a limit."""
        self._close(LIMIT_S if retry_after_s is None else retry_after_s, now)

    def failed(self, now: float) -> None:
        """Record a failure."""
        # Requests that were on their way together fail together, and count once.
        if now >= self.open_at:
            self.failures += 1
            self._close(min(PAUSE_S * 2 ** (self.failures - 1), PAUSE_S_MAX), now)

    def _close(self, wait_s: float, now: float) -> None:
        if wait_s > 0:
            self.open_at = max(self.open_at, now + min(wait_s, LIMIT_S_MAX))
            self.free_at = max(self.free_at, now + wait_s)


def retry_after_s(headers: Mapping[str, str], unix_now: float) -> float | None:
    """Return when to come back by the headers, in seconds from now; None: they do not say."""
    if (milliseconds := _number(headers.get("retry-after-ms", ""))) is not None:
        return milliseconds / 1000
    header = headers.get("retry-after", "")
    if not header or (seconds := _number(header)) is not None:
        return seconds if header else None
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - unix_now)


def _exhausted_s(headers: Mapping[str, str], what: str) -> float:
    """Return for how many seconds a limit is exhausted (0: it is not), by a header such as `1.5`, `20ms` or `6m0s`."""
    remaining = _number(headers.get(f"x-ratelimit-remaining-{what}", ""))
    if remaining is None or remaining > 0:
        return 0.0
    header = headers.get(f"x-ratelimit-reset-{what}", "").strip()
    if (seconds := _number(header)) is not None:
        return seconds
    parts = _DURATION.findall(header)
    if not parts or "".join(map("".join, parts)) != header:
        return LIMIT_S
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
