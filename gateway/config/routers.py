"""The router of a configuration: its policies with the learned routers that they name, loaded and checked."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gateway.routing.features import language_identifier
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


@dataclass(frozen=True, eq=False)
class LearnedPredictor:
    """`PromptPredictor` or `AnswerPredictor` by a head of an artefact, which chooses between two models.

    Attributes:
        models: the weak one and the strong one.
        score: by the prompt and, of a cascade, the answer.
        threshold: the gain from which on the strong model answers.
        gains: see `Router.held_out`.
    """

    by: HeadKey
    models: tuple[str, str]
    score: Callable[[str, str], Estimate]
    threshold: float
    gains: NDArray[np.float32]

    def predict(self, prompt: str, answer: str = "") -> Prediction:
        """The score of one request, and what follows from it."""
        found = self.score(prompt, answer)
        strong = found.gain >= self.threshold
        word = "at least" if strong else "below"
        reason = f"predicted gain {found.gain:.2f} is {word} {self.threshold:.2f}"
        chances = dict(zip(self.models, (found.p_weak, found.p_strong), strict=True))
        return Prediction(HeadScore(self.by, found.gain, chances), strong, reason)


def load_router(settings: Settings, models: Mapping[str, ModelFacts]) -> Router:
    """The router of ``settings``.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    routing = settings.routing
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    prompts: dict[str, PromptPredictor] = {}
    answers: dict[str, AnswerPredictor] = {}
    held_out: dict[HeadKey, NDArray[np.float32]] = {}
    for name, policy in {"": routing, **routing.policies}.items():
        key, cascade, prompt = policy_key(name), policy.cascade, None
        _require_known_checks(key, policy)
        if any(rule.languages for rule in policy.rules):
            language_identifier()
        if policy.learned is not None:
            prompt = prompts[name] = _prompt_head(key, policy.learned)
            held_out[prompt.by] = prompt.gains
        if cascade is not None and cascade.artefact is not None:
            answer = answers[name] = _answer_head(key, cascade, cascade.artefact, prompt)
            held_out[answer.by] = answer.gains
    return Router(routing, models, prompts, answers, digest[:12], held_out)


def _prompt_head(key: str, route: LearnedRoute) -> LearnedPredictor:
    router = _load(f"{key}.learned.artefact", route.artefact)
    calibration = router.prompts.calibration
    return LearnedPredictor(
        HeadKey(key, _version(router), PROMPT),
        (route.weak, route.strong),
        lambda prompt, _: router.score(prompt),
        _threshold(calibration, route.target),
        calibration.gains,
    )


def _answer_head(
    key: str, route: CascadeRoute, path: str, prompt: LearnedPredictor | None
) -> LearnedPredictor:
    """``prompt``: the head that decides first, if there is one."""
    router = _load(f"{key}.cascade.artefact", path)
    if router.cascade is None:
        raise SettingsError(
            f"{key}.cascade.artefact: {path} was trained without answers; train it with sluice router train --cascade"
        )
    gains, version = router.cascade.calibration.gains, _version(router)
    if prompt is not None and prompt.by.version == version:
        # What the prompt head of the same artefact sends to the strong model gets no weak answer.
        kept = prompt.gains < prompt.threshold
        gains = gains[kept] if kept.any() else gains
    return LearnedPredictor(
        HeadKey(key, version, CASCADE),
        (route.first, route.second),
        router.score_with_answer,
        _threshold(router.cascade.calibration, route.target),
        gains,
    )


def _require_known_checks(key: str, policy: RoutingPolicy) -> None:
    for i, name in enumerate(policy.cascade.checks if policy.cascade else ()):
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise SettingsError(f"{key}.cascade.checks.{i}: no check {name!r}; known: {known}")


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
