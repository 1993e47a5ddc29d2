"""The active batching policy of a model: as configured, and as its schedule changes it over time."""

import logging
from collections.abc import Mapping
from datetime import datetime

from sluice.settings import ModelSettings, Settings
from sluice.settings.batching import Policy, policy_notes

logger = logging.getLogger(__name__)


class ActivePolicy:
    """Resolves the schedule of a model's policy, outside of the scheduler, which has no clock.

    Attributes:
        policy: the policy that is active now.
        weights: shares of the tenants whose weight is not 1.
    """

    def __init__(self, model: ModelSettings, settings: Settings, moment: datetime) -> None:
        self._model = model
        self._scheduled = settings.policy_of(model)
        self.policy: Policy = self._scheduled.at(moment)
        self.weights: Mapping[str, float] = settings.weights

    def change(self, settings: Settings, moment: datetime) -> None:
        """Apply another configuration."""
        before, self._scheduled = self._scheduled, settings.policy_of(self._model)
        self.policy = self._scheduled.at(moment)
        self.weights = settings.weights
        if self._scheduled != before:
            self.log_notes()

    def follow(self, moment: datetime) -> bool:
        """Activate the policy that is scheduled for this moment; return whether it is another one."""
        policy = self._scheduled.at(moment)
        if policy == self.policy:
            return False
        self.policy = policy
        values = policy.model_dump(exclude={"name", "classes"}).items()
        text = ", ".join(f"{key} {value}" for key, value in values)
        logger.info(
            "activated scheduled policy %s for model %s (%s)", policy.name, self._model.name, text
        )
        return True

    def log_notes(self) -> None:
        """Log which parts of the policy have no effect on the model's engine."""
        model, streams = self._model, not self._model.computes_whole
        for note in policy_notes(self._scheduled, model.name, model.engine, streams=streams):
            logger.info("%s", note)
