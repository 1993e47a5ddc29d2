"""The router of a configuration: its policies with the learned routers that they name, loaded and checked."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gateway.routing.cascade.watch import Judge, Judgement
from gateway.routing.learned.artefact import BadArtefact, load
from gateway.routing.learned.calibration import Calibration
from gateway.routing.learned.router import LearnedRouter
from gateway.routing.router import ModelFacts, PolicyRouter, Prediction, Predictor
from gateway.routing.scores import CASCADE, PROMPT, HeadId, Score, policy_key
from sluice.settings import Settings, SettingsError
from sluice.settings.routing import CascadeRoute, RoutingPolicy, Target

HeldOut = dict[HeadId, NDArray[np.float32]]
"""See `Router.held_out`."""


class LearnedPredictor:
    """`Predictor` by an artefact of `sluice router train` and a target."""

    def __init__(self, router: LearnedRouter, target: Target) -> None:
        self.threshold = _threshold(router.prompts.calibration, target)
        self._router = router

    @property
    def version(self) -> str:
        """See `Predictor.version`."""
        return _version(self._router)

    def predict(self, text: str) -> Prediction:
        """See `Predictor.predict`."""
        score = self._router.score(text)
        strong = score.gain >= self.threshold
        than = "at least" if strong else "below"
        reason = (
            f"predicted gain {score.gain:.2f} (give or take {score.uncertainty:.2f})"
            f" is {than} {self.threshold:.2f}"
        )
        return Prediction(strong, score.gain, score.p_weak, score.p_strong, reason)


class LearnedJudge:
    """`Judge` by the cascade head of an artefact and the target of ``route``."""

    def __init__(self, policy: str, router: LearnedRouter, route: CascadeRoute) -> None:
        assert router.cascade is not None, "checked when it was loaded"
        self.by = HeadId(policy, _version(router), CASCADE)
        self._router = router
        self._route = route
        self._threshold = _threshold(router.cascade.calibration, route.target)

    def judge(self, prompt: str, answer: str) -> Judgement:
        """See `Judge.judge`."""
        found = self._router.score_with_answer(prompt, answer)
        chances = {self._route.first: found.p_weak, self._route.second: found.p_strong}
        doubt = ""
        if found.gain >= self._threshold:
            doubt = f"predicted gain {found.gain:.2f} is at least {self._threshold:.2f}"
        return Judgement(doubt, Score(self.by, found.gain, chances))


def load_router(settings: Settings, models: Mapping[str, ModelFacts]) -> PolicyRouter:
    """The router of ``settings``.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    routing = settings.routing
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    predictors: dict[str, Predictor] = {}
    judges: dict[str, Judge] = {}
    held_out: HeldOut = {}
    for name, policy in {"": routing, **routing.policies}.items():
        _load_policy(name, policy, predictors, judges, held_out)
    return PolicyRouter(routing, models, predictors, judges, digest[:12], held_out)


def _load_policy(
    name: str,
    policy: RoutingPolicy,
    predictors: dict[str, Predictor],
    judges: dict[str, Judge],
    held_out: HeldOut,
) -> None:
    key, kept = policy_key(name), None
    if policy.learned is not None:
        router = _load(f"{key}.learned.artefact", policy.learned.artefact)
        predictor = predictors[name] = LearnedPredictor(router, policy.learned.target)
        gains = router.prompts.calibration.gains
        held_out[HeadId(key, predictor.version, PROMPT)] = gains
        kept = (predictor.version, gains < predictor.threshold)
    if policy.cascade is not None and policy.cascade.artefact is not None:
        router = _load_cascade(f"{key}.cascade.artefact", policy.cascade.artefact)
        judge = judges[name] = LearnedJudge(key, router, policy.cascade)
        held_out[judge.by] = _judged_gains(router, kept)


def _judged_gains(
    router: LearnedRouter, kept: tuple[str, NDArray[np.bool_]] | None
) -> NDArray[np.float32]:
    """The held-out gains of the answers that would be judged.

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
        return calibration.for_quality(target.quality).threshold
    assert target.strong_share is not None, "one of the two is set"
    return calibration.for_large_share(target.strong_share).threshold
