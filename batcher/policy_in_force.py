"""The batching policy of a model: as the configuration says, and as its schedule makes it at a moment."""

import logging
from collections.abc import Mapping
from datetime import datetime

from sluice.settings import ModelSettings, Settings
from sluice.settings.batching import Policy, policy_notes

log = logging.getLogger(__name__)


class PolicyInForce:
    """Resolves the schedule of a model's policy, outside of the scheduler, which has no clock.

    Attributes:
        policy: in force.
        weights: shares of the tenants that differ from 1.
    """

    def __init__(self, model: ModelSettings, settings: Settings, moment: datetime) -> None:
        self._model = model
        self._scheduled = settings.policy_of(model)
        self.policy: Policy = self._scheduled.at(moment)
        self.weights: Mapping[str, float] = settings.weights

    def change(self, settings: Settings, moment: datetime) -> None:
        """Take another configuration."""
        before, self._scheduled = self._scheduled, settings.policy_of(self._model)
        self.policy = self._scheduled.at(moment)
        self.weights = settings.weights
        if self._scheduled != before:
            self.log_notes()

    def follow(self, moment: datetime) -> bool:
        """Take the policy that the schedule puts in force at ``moment``; return whether it is another one."""
        policy = self._scheduled.at(moment)
        if policy == self.policy:
            return False
        self.policy = policy
        values = policy.model_dump(exclude={"name", "classes"}).items()
        described = ", ".join(f"{key} {value}" for key, value in values)
        log.info(
            "policy %s in force for model %s: its schedule (%s)",
            policy.name,
            self._model.name,
            described,
        )
        return True

    def log_notes(self) -> None:
        """Log in which respect the policy makes no difference to the model's engine."""
        model = self._model
        for note in policy_notes(
            self._scheduled, model.name, model.engine, streams=not model.computes_whole
        ):
            log.info("%s", note)
