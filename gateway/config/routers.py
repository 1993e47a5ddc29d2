"""The router of a configuration: its policies with the learned routers that they name, loaded and checked."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.routing.features import language_identifier
from gateway.routing.learned.artefact import BadArtefact, load
from gateway.routing.learned.model import Calibration, LearnedRouter
from gateway.routing.prediction import CASCADE, PROMPT, HeadKey, LearnedHead, policy_key
from gateway.routing.router import ModelFacts, Router
from gateway.upstream.cascade import CHECKS
from sluice.settings import Settings, SettingsError
from sluice.settings.routing import CascadeRoute, LearnedRoute, RoutingPolicy, Target


def load_router(settings: Settings, models: Mapping[str, ModelFacts]) -> Router:
    """The router of ``settings``.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    routing = settings.routing
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    heads = [
        head
        for name, policy in {"": routing, **routing.policies}.items()
        for head in _heads(policy_key(name), policy)
    ]
    return Router(routing, models, heads, digest[:12])


def _heads(key: str, policy: RoutingPolicy) -> Iterator[LearnedHead]:
    """The learned heads that a policy names, once the rest of it is checked."""
    cascade, prompt = policy.cascade, None
    for i, name in enumerate(cascade.checks if cascade else ()):
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise SettingsError(f"{key}.cascade.checks.{i}: no check {name!r}; known: {known}")
    if any(rule.languages for rule in policy.rules):
        language_identifier()
    if policy.learned is not None:
        yield (prompt := _prompt_head(key, policy.learned))
    if cascade is not None and cascade.artefact is not None:
        yield _answer_head(key, cascade, cascade.artefact, prompt)


def _prompt_head(key: str, route: LearnedRoute) -> LearnedHead:
    router = _load(f"{key}.learned.artefact", route.artefact)
    calibration = router.prompts.calibration
    return LearnedHead(
        HeadKey(key, _version(router), PROMPT),
        (route.weak, route.strong),
        lambda prompt, _: router.score(prompt),
        _threshold(calibration, route.target),
        calibration.gains,
    )


def _answer_head(
    key: str, route: CascadeRoute, path: str, prompt: LearnedHead | None
) -> LearnedHead:
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
    return LearnedHead(
        HeadKey(key, version, CASCADE),
        (route.first, route.second),
        router.score_with_answer,
        _threshold(router.cascade.calibration, route.target),
        gains,
    )


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
