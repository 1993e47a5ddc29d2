"""The router of a configuration: its policies with the learned routers that they name, loaded and checked."""

import hashlib
from collections.abc import Mapping

from gateway.routing.router import ModelFacts, PolicyRouter, Predictor
from sluice.settings import Settings


def load_router(settings: Settings, models: Mapping[str, ModelFacts]) -> PolicyRouter:
    """The router of ``settings``.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    routing = settings.routing
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    predictors: dict[str, Predictor] = {}
    return PolicyRouter(routing, models, predictors, {}, digest[:12])
