"""Limits the share of a tenant's cascades that use the second model, and so what a cascade may cost.

The latest requests are counted, not the running ones: escalated requests run longer, so a quarter of all requests can
be half of the running ones.
"""

from collections import OrderedDict, deque
from typing import Final

WINDOW: Final = 100
"""Latest requests of a tenant that are counted."""
ALWAYS_ALLOWED: Final = 10
"""Escalations in the window that are allowed at any share: a share of few requests means little."""
TENANTS_MAX: Final = 4096
"""Beyond it the tenant that was idle for longest is dropped."""


class CascadeRequest:
    """One request of a cascade.

    Attributes:
        escalated: the second model is working on it, or answered it.
    """

    def __init__(self, recent: deque["CascadeRequest"]) -> None:
        self.escalated = False
        self._recent = recent

    def may_escalate(self, share: float) -> bool:
        """Whether the second model may start, with at most ``share`` of the tenant's latest requests using it."""
        escalated = sum(request.escalated for request in self._recent)
        return escalated + 1 <= max(ALWAYS_ALLOWED, share * len(self._recent))


class EscalationLimiter:
    """The latest requests of each tenant."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, deque[CascadeRequest]] = OrderedDict()

    def started(self, tenant: str) -> CascadeRequest:
        """A request of a cascade starts."""
        recent = self._recent.setdefault(tenant, deque(maxlen=WINDOW))
        self._recent.move_to_end(tenant)
        if len(self._recent) > TENANTS_MAX:
            self._recent.popitem(last=False)
        request = CascadeRequest(recent)
        recent.append(request)
        return request
