"""Policies as a configuration file writes them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import yaml

from gateway.safety import loading
from gateway.safety.policy import SafetyPolicies

MODELS: Final = {"small": (), "governed": ()}


def no_list(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory")


def load_policies(
    text: str,
    read_list: Callable[[str], str] = no_list,
    models: Mapping[str, Sequence[str]] = MODELS,
    token_classifiers: Collection[str] = (),
) -> SafetyPolicies:
    """Those of the file ``text``; see `gateway.safety.loading.load_policies`."""
    section = (yaml.safe_load(text) or {}).get(loading.SECTION, {})
    return loading.load_policies(section, read_list, models, token_classifiers)
