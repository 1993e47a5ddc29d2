"""A limit on what each tenant may have at the same time."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice.errors import RETRY_AFTER_S, Overloaded


def overloaded(limit: str, message: str) -> Overloaded:
    """Return the refusal of a call by the gateway's own limit named `limit`; see docs/operate/limits.md."""
    return Overloaded(message, metadata={"limit": limit}, retry_after_s=RETRY_AFTER_S)


class CountLimit:
    """Counts what each tenant has, up to a maximum.

    Attributes:
        maximum: The most that one tenant may have.
        counts: What each tenant has; a tenant that has nothing has no entry.
    """

    def __init__(self, maximum: int, name: str, what: str) -> None:
        """Limit each tenant to `maximum`.

        Args:
            maximum: The most that one tenant may have.
            name: The limit in errors, for programs.
            what: Continues "the limit of N ..." in errors, for people.
        """
        self.maximum, self._name, self._what = maximum, name, what
        self.counts = defaultdict[str, int](int)

    def take(self, tenant: str, count: int = 1) -> None:
        """Count `count` more for `tenant`, until `give`.

        Raises:
            Overloaded: It would exceed the maximum; nothing was counted.
        """
        if self.counts.get(tenant, 0) + count > self.maximum:
            raise overloaded(self._name, f"{self.maximum} {self._what}")
        self.counts[tenant] += count

    def give(self, tenant: str, count: int = 1) -> None:
        """Count `count` less for `tenant`."""
        self.counts[tenant] -= count
        if not self.counts[tenant]:
            del self.counts[tenant]

    @contextmanager
    def held(self, tenant: str, count: int = 1) -> Iterator[Callable[[int], None]]:
        """Count `count` in the block, and what the yielded function is called with in addition."""

        def take(more: int) -> None:
            nonlocal count
            self.take(tenant, more)
            count += more

        self.take(tenant, count)
        try:
            yield take
        finally:
            self.give(tenant, count)
