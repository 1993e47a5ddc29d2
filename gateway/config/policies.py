"""Loads what a reload may change: models, routers, and the safety policies with their word lists, compiled."""

from pathlib import Path

import yaml

from gateway.admission import policies
from gateway.config.models import CLASSIFIERS, ModelFolder, load_catalog
from gateway.config.routers import load_router
from gateway.safety.compiled import CompiledPolicies, compile_policies, rule_names
from gateway.safety.inspector import Inspector
from gateway.safety.policy import SECTION, Policies, PolicyError, load_policies
from gateway.safety.rules.lexicon import Lexicon
from gateway.safety.rules.spec import RuleError
from sluice.settings import Settings, SettingsError


def load_all(
    settings: Settings, path: Path | None, before: policies.Policies | None = None
) -> policies.Policies:
    """All policies of ``settings``; it takes about a second, and any thread may do it.

    Args:
        path: the file they came from, for the lines in errors.
        before: those that they replace: what has not changed is not loaded again, and a dry run goes on.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    catalog = load_catalog(settings, before.catalog if before else None)
    router = load_router(settings, catalog.facts)
    compiled = load_policies_of(settings, path)
    inspector = Inspector(compiled, before.inspector if before else None)
    return policies.Policies(settings, catalog, router, inspector)


def read_policies(settings: Settings, path: Path | None = None) -> Policies:
    """The policies of ``settings``, checked; ``path`` is the file they came from, for the lines in errors.

    Raises:
        SettingsError: one line that names what cannot work.
    """
    where = f"{path}: " if path else ""
    try:
        text = _text(settings, path)
        taggers = [one.name for one in settings.models if one.engine == "token_classifier"]
        policies = load_policies(text, _read_list, rule_names(), _labels(settings), taggers)
        for policy in policies.by_name.values():
            Lexicon(policy.deny, policy.allow)
    except (PolicyError, RuleError) as error:
        raise SettingsError(f"{where}{error}") from None
    return policies


def load_policies_of(settings: Settings, path: Path | None = None) -> CompiledPolicies:
    """The policies of ``settings``, compiled; it takes about a second, and any thread may do it.

    Raises:
        SettingsError: as `read_policies`.
    """
    return compile_policies(read_policies(settings, path), _labels(settings))


def _labels(settings: Settings) -> dict[str, tuple[str, ...]]:
    """All models by name, with the labels of those that classify; the folders of others are not looked at."""
    return {
        model.name: ModelFolder(model).labels if model.engine in CLASSIFIERS else ()
        for model in settings.models
    }


def _text(settings: Settings, path: Path | None) -> str:
    """The file as it was written, unless the environment overrides its section."""
    section = settings.model_dump(mode="json")[SECTION]
    if path is not None:
        text = path.read_text(encoding="utf-8")
        if ((yaml.safe_load(text) or {}).get(SECTION) or {}) == section:
            return text
    return yaml.safe_dump({SECTION: section}, sort_keys=False)


def _read_list(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")
