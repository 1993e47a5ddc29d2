"""How many of a tenant's cascades a second model worked on: the bound on what a cascade may cost more.

Counted are the latest requests, not those that run: what goes over runs longer, so a quarter of all requests can be
half of the running ones.
"""

from collections import OrderedDict, deque
from typing import Final

WINDOW: Final = 100
"""Requests of a tenant that count."""
FREE: Final = 10
"""So many of them may go over in any case: a share of few requests says nothing."""
TENANTS_MAX: Final = 4096
"""The one that was not heard of for longest is forgotten."""


class Attempt:
    """One request of a cascade.

    Attributes:
        over: a second model works on it, or has answered it.
    """

    def __init__(self, recent: deque["Attempt"]) -> None:
        self.over = False
        self._recent = recent

    def may_go_over(self, share: float) -> bool:
        """Whether a second model may begin, with at most ``share`` of the tenant's latest requests having one."""
        over = sum(attempt.over for attempt in self._recent)
        return over + 1 <= max(FREE, share * len(self._recent))


class Escalations:
    """The latest requests of each tenant."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, deque[Attempt]] = OrderedDict()

    def began(self, tenant: str) -> Attempt:
        """A request of a cascade runs."""
        recent = self._recent.setdefault(tenant, deque(maxlen=WINDOW))
        self._recent.move_to_end(tenant)
        if len(self._recent) > TENANTS_MAX:
            self._recent.popitem(last=False)
        attempt = Attempt(recent)
        recent.append(attempt)
        return attempt
