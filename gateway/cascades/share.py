"""How many requests of a tenant have a second model at work, of those that run."""

from collections import Counter


class Escalations:
    """Running requests by tenant, and those of them that went over."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._over: Counter[str] = Counter()

    def began(self, tenant: str) -> None:
        """A request of a cascade runs."""
        self._running[tenant] += 1

    def went_over(self, tenant: str) -> None:
        """One of them went over."""
        self._over[tenant] += 1

    def came_back(self, tenant: str) -> None:
        """The second model of one that went over is not needed any more."""
        self._over[tenant] -= 1

    def ended(self, tenant: str, *, over: bool) -> None:
        """One of them ended; ``over``: it had gone over."""
        self._running[tenant] -= 1
        self._over[tenant] -= over
        for counts in (self._running, self._over):
            if not counts[tenant]:
                del counts[tenant]

    def may_go_over(self, tenant: str, share: float) -> bool:
        """Whether one more may, with at most ``share`` of the running ones; a single one always may."""
        return self._over[tenant] + 1 <= max(1.0, share * self._running[tenant])
