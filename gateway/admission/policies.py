"""What a reload may change, as one value that never changes, and the reference to the one in force.

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

PREPARE_S: Final = 10.0
"""How long a request may be prepared before it has a stream, seconds."""


@dataclass(frozen=True)
class Policies:
    """Models, routes, safety rules and limits.

    Attributes:
        settings: of which they were made; of them only what a reload may change is read here.
    """

    settings: Settings
    catalog: Catalog
    router: Router
    inspector: Inspector

    @cached_property
    def overload(self) -> OverloadRules:
        """Which models are refused or replaced, and when."""
        routing, catalog = self.settings.routing, self.catalog
        weights = self.settings.weights
        return OverloadRules(routing.breaker, routing.fallbacks, catalog.settings, weights)

    @property
    def versions(self) -> list[str]:
        """Of all that decides, with the files that the settings name."""
        models = [one.version for one in self.catalog.served.values()]
        return [*models, *self.inspector.versions, *self.router.versions]


class InForce:
    """The policies that requests get from now on.

    Args:
        registry: the live streams. One that is older than a reload may still send tasks to the models of before; and
            its rows may be of an answer that began at another gateway, with a version that was replaced since.

    Attributes:
        policies: the one reference that a reload changes, by `replace`.
        problem: why this gateway cannot take what the others have taken; empty: it has taken it.
    """

    def __init__(self, policies: Policies, registry: Registry) -> None:
        self.policies = policies
        self.problem = ""
        self._registry = registry
        registry.dispatch.use_weights(policies.settings.weights)
        self._reloaded = False
        self._replaced: dict[str, float] = {}
        """When, by task name."""

    def replace(self, policies: Policies, now: float) -> None:
        """Requests from now on get ``policies``."""
        self._replaced |= dict.fromkeys(self.policies.catalog.tasks.values(), now)
        self.policies, self._reloaded = policies, True
        self._registry.dispatch.use_weights(policies.settings.weights)
        for task in policies.catalog.tasks.values():
            self._replaced.pop(task, None)

    def task_names(self, now: float) -> set[str]:
        """Those of all versions of models that requests may still send tasks to."""
        if self._replaced:
            arrivals = (one.request.arrived_at for one in self._registry)
            oldest = min(arrivals, default=now)
            self._replaced = {
                name: at
                for name, at in self._replaced.items()
                if oldest <= at or now < at + PREPARE_S
            }
        rows = self._registry.dispatch.task_names if self._reloaded else ()
        return {*self.policies.catalog.tasks.values(), *self._replaced, *rows}
