"""Policies as a configuration file writes them."""

from collections.abc import Callable
from typing import Any

import yaml

from gateway.safety import policy


def load_policies(
    text: str, read_list: Callable[[str], str], *known: Any, **more: Any
) -> policy.SafetyPolicies:
    """Those of the file ``text``; see `gateway.safety.policy.load_policies`."""
    section = (yaml.safe_load(text) or {}).get(policy.SECTION, {})
    return policy.load_policies(section, read_list, *known, **more)
