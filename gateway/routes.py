"""The router of a configuration: its policies with the learned routers that they name, loaded and checked."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gateway.cascades.watch import Judge
from gateway.routing.learned.artefact import BadArtefact, load
from gateway.routing.learned.calibration import Calibration
from gateway.routing.learned.router import LearnedRouter
from gateway.routing.router import ModelFacts, PolicyRouter, Prediction, Predictor
from sluice.routing import RoutingPolicy, Target
from sluice.settings import Settings, SettingsError


class LearnedPredictor:
    """`Predictor` by an artefact of `sluice router train` and a target."""

    def __init__(self, router: LearnedRouter, target: Target) -> None:
        self._router = router
        self._threshold = _threshold(router.prompts.calibration, target)

    @property
    def version(self) -> str:
        """See `Predictor.version`."""
        return self._router.version[:12]

    def predict(self, text: str) -> Prediction:
        """See `Predictor.predict`."""
        score = self._router.score(text)
        strong = score.gain >= self._threshold
        than = "at least" if strong else "below"
        reason = (
            f"predicted gain {score.gain:.2f} (give or take {score.uncertainty:.2f})"
            f" is {than} {self._threshold:.2f}"
        )
        return Prediction(strong, score.p_weak, score.p_strong, reason)


class LearnedJudge:
    """`Judge` by the cascade head of an artefact and a target."""

    def __init__(self, router: LearnedRouter, target: Target) -> None:
        assert router.cascade is not None, "checked when it was loaded"
        self._router = router
        self._threshold = _threshold(router.cascade.calibration, target)

    def doubt(self, prompt: str, answer: str) -> str:
        """See `Judge.doubt`."""
        gain = self._router.score_with_answer(prompt, answer).gain
        if gain < self._threshold:
            return ""
        return f"predicted gain {gain:.2f} is at least {self._threshold:.2f}"


def load_router(settings: Settings, models: Mapping[str, ModelFacts]) -> PolicyRouter:
    """The router of ``settings``.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    routing = settings.routing
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    predictors: dict[str, Predictor] = {}
    judges: dict[str, Judge] = {}
    for name, policy in {"": routing, **routing.policies}.items():
        key = f"routing.policies.{name}" if name else "routing"
        _load_policy(name, key, policy, predictors, judges)
    return PolicyRouter(routing, models, predictors, judges, digest[:12])


def _load_policy(
    name: str,
    key: str,
    policy: RoutingPolicy,
    predictors: dict[str, Predictor],
    judges: dict[str, Judge],
) -> None:
    if policy.learned is not None:
        router = _load(f"{key}.learned.artefact", policy.learned.artefact)
        predictors[name] = LearnedPredictor(router, policy.learned.target)
    if policy.cascade is not None and policy.cascade.artefact is not None:
        where = f"{key}.cascade.artefact"
        router = _load(where, policy.cascade.artefact)
        if router.cascade is None:
            raise SettingsError(
                f"{where}: {policy.cascade.artefact} was trained without answers; "
                "train it with sluice router train --cascade"
            )
        judges[name] = LearnedJudge(router, policy.cascade.target)


def _load(key: str, path: str) -> LearnedRouter:
    try:
        return load(Path(path).expanduser())
    except BadArtefact as error:
        raise SettingsError(f"{key}: {error}") from None


def _threshold(calibration: Calibration, target: Target) -> float:
    if target.quality is not None:
        return calibration.for_quality(target.quality).threshold
    assert target.strong_share is not None, "one of the two is set"
    return calibration.for_large_share(target.strong_share).threshold
