"""Loads what a reload may change: models, routers with their learned heads, and compiled safety policies."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.admission import policies
from gateway.config.models import CLASSIFIERS, ModelFolder, load_catalog
from gateway.routing.features import language_identifier
from gateway.routing.learned.artefact import BadArtefact, load
from gateway.routing.learned.model import Calibration, HeadKey, LearnedHead, policy_key
from gateway.routing.router import Router, check_patterns
from gateway.safety.inspector import Inspector
from gateway.safety.loading import load_policies
from gateway.safety.policy import SafetyPolicies
from gateway.upstream.cascade import CHECKS
from sluice.settings import ModelSettings, Settings, SettingsError
from sluice.settings.routing import RoutingPolicy, Target
from sluice.v1.admin_pb2 import ROUTER_HEAD_CASCADE, ROUTER_HEAD_PROMPT, RouterHead


def load_all(settings: Settings, before: policies.Policies | None = None) -> policies.Policies:
    """Load all policies of `settings`, in any thread; blocks while files are read, and models of the hub downloaded.

    What has not changed in comparison with `before` is not loaded again, and a dry run continues.

    Raises:
        SettingsError: one line that names what is wrong.
    """
    catalog = load_catalog(settings, before.catalog if before else None)
    router = load_router(settings, catalog.settings)
    inspector = Inspector(load_policies_of(settings), before.inspector if before else None)
    return policies.Policies(settings, catalog, router, inspector)


def read_policies(settings: Settings) -> SafetyPolicies:
    """Read and check the safety policies of `settings`.

    Raises:
        SettingsError: one line that names what is wrong.
    """
    taggers = [model.name for model in settings.models if model.engine == "token_classifier"]
    return load_policies(settings.safety, _read_list, _labels(settings), taggers)


def load_policies_of(settings: Settings) -> SafetyPolicies:
    """Compile the safety policies of `settings`; takes about a second, in any thread.

    Raises:
        SettingsError: as `read_policies`.
    """
    policies = read_policies(settings)
    policies.compile()
    return policies


def _labels(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return all models by name, with the labels of classifiers; other folders are not read."""
    return {
        model.name: ModelFolder(model).labels if model.engine in CLASSIFIERS else ()
        for model in settings.models
    }


def _read_list(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")


def load_router(settings: Settings, models: Mapping[str, ModelSettings]) -> Router:
    """Load the router of `settings`.

    Raises:
        SettingsError: one line that names what is wrong.
    """
    routing = settings.routing
    check_patterns(routing)
    digest = hashlib.sha256(routing.model_dump_json().encode()).hexdigest()
    heads = [
        head
        for name, policy in {"": routing, **routing.policies}.items()
        for head in _heads(policy_key(name), policy)
    ]
    return Router(routing, models, heads, digest[:12])


def _heads(key: str, policy: RoutingPolicy) -> Iterator[LearnedHead]:
    """Check a routing policy, and yield the learned heads that it names."""
    learned, cascade, prompt = policy.learned, policy.cascade, None
    for index, name in enumerate(cascade.checks if cascade else ()):
        if name not in CHECKS:
            names = ", ".join(CHECKS)
            raise SettingsError(f"{key}.cascade.checks.{index}: no check {name!r}; known: {names}")
    # Load the model of languages now, not with the first request.
    if any(rule.languages for rule in policy.rules):
        language_identifier()
    if learned is not None and learned.artefact is not None:
        models = learned.weak, learned.strong
        prompt = _head(key, ROUTER_HEAD_PROMPT, learned.artefact, models, learned.target)
        yield prompt
    if cascade is not None and cascade.artefact is not None:
        models = cascade.first, cascade.second
        kind = ROUTER_HEAD_CASCADE
        yield _head(key, kind, cascade.artefact, models, cascade.target, prompt)


def _head(
    key: str,
    kind: RouterHead.ValueType,
    path: str,
    models: tuple[str, str],
    target: Target,
    first: LearnedHead | None = None,
) -> LearnedHead:
    """Load one head; `first` is the head that decides before it, if there is one."""
    where = f"{key}.{'learned' if kind == ROUTER_HEAD_PROMPT else 'cascade'}.artefact"
    try:
        router = load(Path(path).expanduser())
    except BadArtefact as error:
        raise SettingsError(f"{where}: {error}") from None
    head, by = router.prompts, HeadKey(key, router.version[:12], kind)
    if kind == ROUTER_HEAD_CASCADE:
        # A head for cascades needs the weak model's answers in training.
        if router.cascade is None:
            raise SettingsError(
                f"{where}: {path} was trained without answers; train it with sluice router train --cascade"
            )
        head = router.cascade
    gains = head.calibration.gains
    if first is not None and first.by.version == by.version:
        # What the prompt head of the same artefact sends to the strong model gets no weak answer.
        weak = first.gains < first.threshold
        gains = gains[weak] if weak.any() else gains
    return LearnedHead(by, models, head.score, _threshold(head.calibration, target), gains)


def _threshold(calibration: Calibration, target: Target) -> float:
    if target.quality is not None:
        return calibration.for_quality(target.quality).value
    assert target.strong_share is not None, "one of the two is set"
    return calibration.for_large_share(target.strong_share).value
