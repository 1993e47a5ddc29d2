"""The spending of each tenant in the last hour: a sliding window in steps of one minute."""

from collections import deque
from typing import Final

WINDOW_S: Final = 3600.0
_STEP_S: Final = 60.0


class _Window:
    def __init__(self) -> None:
        self.minutes: deque[tuple[float, float]] = deque()
        self.total = 0.0

    def expire(self, now: float) -> None:
        while self.minutes and self.minutes[0][0] <= now - WINDOW_S:
            self.total -= self.minutes.popleft()[1]
        if not self.minutes:
            self.total = 0.0  # drops rounding errors


class Spending:
    """Costs by tenant, as this gateway has seen them."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def add(self, tenant: str, cost: float, now: float) -> None:
        """Adds ``cost`` to the tenant's spending."""
        if cost <= 0:
            return
        window = self._windows.setdefault(tenant, _Window())
        window.expire(now)
        minute = now // _STEP_S * _STEP_S
        if window.minutes and window.minutes[-1][0] == minute:
            cost_before = window.minutes.pop()[1]
            window.minutes.append((minute, cost_before + cost))
        else:
            window.minutes.append((minute, cost))
        window.total += cost

    def spent(self, tenant: str, now: float) -> float:
        """In the last hour."""
        window = self._windows.get(tenant)
        if window is None:
            return 0.0
        window.expire(now)
        return window.total
