"""What a reload may change, as one immutable value, and the reference to the value in force.

A request takes the value once, when it is admitted, and carries it to its end. What counts or waits (buckets, breakers,
records) is not part of it: such an object gets its part of the value with the call.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gateway.admission.overload import OverloadRules
from gateway.models.catalog import Catalog
from gateway.routing.router import Router
from gateway.safety.inspector import Inspector
from gateway.streaming.registry import Registry
from sluice.settings import Settings
from sluice.settings.limits import LimitSettings

PREPARE_S: Final = 10.0
"""How long a request may be prepared before it has a stream, in seconds."""


@dataclass(frozen=True)
class Policies:
    """Models, routes, safety rules and limits.

    Attributes:
        settings: The settings that they were made of; only what a reload may change is read from them.
        catalog: The models.
        router: Chooses models.
        inspector: The safety policy.
    """

    settings: Settings
    catalog: Catalog
    router: Router
    inspector: Inspector

    @cached_property
    def overload(self) -> OverloadRules:
        """The rules by which models are refused or replaced."""
        routing, catalog = self.settings.routing, self.catalog
        weights = self.settings.weights
        return OverloadRules(
            routing.breaker, routing.fallbacks, catalog.settings, catalog.tasks, weights
        )

    @cached_property
    def has_limits(self) -> bool:
        """Whether any tenant has limits; API keys may have some all the same."""
        tenants = self.settings.tenants.values()
        every = (self.settings.limits, *(tenant.limits for tenant in tenants))
        return any(limits not in (None, LimitSettings()) for limits in every)

    @property
    def versions(self) -> list[str]:
        """Versions of all that decides, with the files that the settings name."""
        models = [model.version for model in self.catalog.served.values()]
        return [*models, *self.inspector.versions, *self.router.versions]


class InForce:
    """The policies that requests get from now on.

    Attributes:
        policies: The one reference that a reload changes, by `replace`.
        problem: Why this gateway cannot use what the others use; empty if it does.
        prepare_s: How long a replaced model may still get requests that are being prepared, in seconds.
    """

    def __init__(
        self, policies: Policies, registry: Registry, prepare_s: float = PREPARE_S
    ) -> None:
        """Begin with `policies`.

        Args:
            policies: What requests get.
            registry: The live streams. A stream that is older than a reload may still send tasks to the models of
                before; and its answer may have begun at another gateway, with a version that was replaced since.
            prepare_s: See `PREPARE_S`.
        """
        self.policies = policies
        self.problem = ""
        self.prepare_s = prepare_s
        self._registry = registry
        registry.dispatch.use_weights(policies.settings.weights)
        self._reloaded = False
        self._replaced: dict[str, float] = {}
        """When models were replaced, by task name."""

    def replace(self, policies: Policies, now: float) -> None:
        """Let later requests get `policies`."""
        self._replaced |= dict.fromkeys(self.policies.catalog.tasks.values(), now)
        self.policies, self._reloaded = policies, True
        self._registry.dispatch.use_weights(policies.settings.weights)
        for task in policies.catalog.tasks.values():
            self._replaced.pop(task, None)

    def task_names(self, now: float) -> set[str]:
        """Return the task names of all versions of models that requests may still send tasks to."""
        if self._replaced:
            arrivals = (stream.arrived_at for stream in self._registry)
            oldest = min(arrivals, default=now)
            self._replaced = {
                name: at
                for name, at in self._replaced.items()
                if oldest <= at or now < at + self.prepare_s
            }
        rows = self._registry.dispatch.task_names if self._reloaded else ()
        return {*self.policies.catalog.tasks.values(), *self._replaced, *rows}
