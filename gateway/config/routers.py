"""The router of a configuration: its policies with the learned routers that they name, loaded and checked."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from gateway.routing import language
from gateway.routing.learned.artefact import BadArtefact, load
from gateway.routing.learned.calibration import Calibration
from gateway.routing.learned.model import Estimate, LearnedRouter
from gateway.routing.prediction import (
    CASCADE,
    PROMPT,
    AnswerPredictor,
    HeadKey,
    HeadScore,
    Prediction,
    PromptPredictor,
    policy_key,
)
from gateway.routing.router import ModelFacts, Router
from gateway.upstream.cascade import CHECKS
from sluice.settings import Settings, SettingsError
from sluice.settings.routing import CascadeRoute, LearnedRoute, RoutingPolicy, Target

HeldOut = dict[HeadKey, NDArray[np.float32]]
"""See `Router.held_out`."""


class LearnedPredictor(PromptPredictor):
    """`PromptPredictor` by the prompt head of an artefact and the target of ``route``."""

    def __init__(self, policy: str, router: LearnedRouter, route: LearnedRoute) -> None:
        self.by = HeadKey(policy, _version(router), PROMPT)
        self.threshold = _threshold(router.prompts.calibration, route.target)
        self._router = router
        self._models = route.weak, route.strong

    @override
    def predict(self, prompt: str) -> Prediction:
        return _prediction(self.by, self._models, self._router.score(prompt), self.threshold)


class LearnedAnswerPredictor(AnswerPredictor):
    """`AnswerPredictor` by the cascade head of an artefact and the target of ``route``."""

    def __init__(self, policy: str, router: LearnedRouter, route: CascadeRoute) -> None:
        assert router.cascade is not None, "checked when it was loaded"
        self.by = HeadKey(policy, _version(router), CASCADE)
        self._router = router
        self._models = route.first, route.second
        self._threshold = _threshold(router.cascade.calibration, route.target)

    @override
    def predict(self, prompt: str, answer: str) -> Prediction:
        found = self._router.score_with_answer(prompt, answer)
        return _prediction(self.by, self._models, found, self._threshold)


def _prediction(
    by: HeadKey, models: tuple[str, str], found: Estimate, threshold: float
) -> Prediction:
    strong = found.gain >= threshold
    reason = (
        f"predicted gain {found.gain:.2f} is {'at least' if strong else 'below'} {threshold:.2f}"
    )
    chances = dict(zip(models, (found.p_weak, found.p_strong), strict=True))
    return Prediction(HeadScore(by, found.gain, chances), strong, reason)


def load_router(settings: Settings, models: Mapping[str, ModelFacts]) -> Router:
    """The router of ``settings``.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    routing = settings.routing
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    predictors: dict[str, PromptPredictor] = {}
    answer_predictors: dict[str, AnswerPredictor] = {}
    held_out: HeldOut = {}
    for name, policy in {"": routing, **routing.policies}.items():
        _load_policy(name, policy, predictors, answer_predictors, held_out)
    return Router(routing, models, predictors, answer_predictors, digest[:12], held_out)


def _load_policy(
    name: str,
    policy: RoutingPolicy,
    predictors: dict[str, PromptPredictor],
    answer_predictors: dict[str, AnswerPredictor],
    held_out: HeldOut,
) -> None:
    key, kept = policy_key(name), None
    _require_known_checks(key, policy)
    if any(rule.languages for rule in policy.rules):
        language.preload()
    if policy.learned is not None:
        router = _load(f"{key}.learned.artefact", policy.learned.artefact)
        predictor = predictors[name] = LearnedPredictor(key, router, policy.learned)
        gains = router.prompts.calibration.gains
        held_out[predictor.by] = gains
        kept = (predictor.by.version, gains < predictor.threshold)
    if policy.cascade is not None and policy.cascade.artefact is not None:
        router = _load_cascade(f"{key}.cascade.artefact", policy.cascade.artefact)
        answers = answer_predictors[name] = LearnedAnswerPredictor(key, router, policy.cascade)
        held_out[answers.by] = _answer_gains(router, kept)


def _require_known_checks(key: str, policy: RoutingPolicy) -> None:
    for i, name in enumerate(policy.cascade.checks if policy.cascade else ()):
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise SettingsError(f"{key}.cascade.checks.{i}: no check {name!r}; known: {known}")


def _answer_gains(
    router: LearnedRouter, kept: tuple[str, NDArray[np.bool_]] | None
) -> NDArray[np.float32]:
    """The held-out gains of the answers that the cascade head would see.

    Where the prompt head of the same artefact decides first, what it sends to the strong model gets no weak answer.
    """
    assert router.cascade is not None, "checked when it was loaded"
    gains = router.cascade.calibration.gains
    if kept is None or kept[0] != _version(router) or not kept[1].any():
        return gains
    return gains[kept[1]]


def _load_cascade(key: str, path: str) -> LearnedRouter:
    router = _load(key, path)
    if router.cascade is None:
        raise SettingsError(
            f"{key}: {path} was trained without answers; train it with sluice router train --cascade"
        )
    return router


def _load(key: str, path: str) -> LearnedRouter:
    try:
        return load(Path(path).expanduser())
    except BadArtefact as error:
        raise SettingsError(f"{key}: {error}") from None


def _version(router: LearnedRouter) -> str:
    return router.version[:12]


def _threshold(calibration: Calibration, target: Target) -> float:
    if target.quality is not None:
        return calibration.for_quality(target.quality).value
    assert target.strong_share is not None, "one of the two is set"
    return calibration.for_large_share(target.strong_share).value
