"""How much a tenant may take: `limits` for every tenant, `tenants.NAME.limits` instead for one."""

from pydantic import Field

from sluice.settings.base import Count, Name, NotNegative, Positive, Section
from sluice.settings.routing import ModelChoice


class RateLimits(Section):
    """Rates; unset: no limit."""

    requests_per_minute: Positive | None = None
    """Requests a minute."""
    tokens_per_minute: Positive | None = None
    """Tokens of prompts and answers a minute. A request reserves its longest answer; unused tokens are returned."""


class SoftLimit(ModelChoice):
    """Gives routed requests to `model` before a limit is reached; a model that a request names stays."""

    share: float = Field(0.8, gt=0, lt=1)
    """Share of any rate or cost from which `model` answers."""


class LimitSettings(RateLimits):
    """Limits of one tenant, over all gateways."""

    burst_s: float = Field(10.0, gt=0, le=3600)
    """How much of a rate may come at once, in seconds of it."""
    models: dict[Name, RateLimits] = Field(default_factory=dict)
    """Rates of single models, beside those of all."""
    concurrent: Count | None = None
    """Calls at the same time."""
    concurrent_bulk: Count | None = None
    """Calls of class bulk at the same time, waiting ones included."""
    cost_per_day: NotNegative | None = None
    """Spending a day (UTC), in `currency`."""
    cost_per_month: NotNegative | None = None
    """Spending a month (UTC), in `currency`."""
    soft: SoftLimit | None = None
    """Cheaper answers before a limit is reached; unset: none."""
