"""What the heads of learned routers say of requests, in a form that outlives the request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

PROMPT: Final = "prompt"
CASCADE: Final = "cascade"


class HeadId(NamedTuple):
    """A head of a learned router as a policy uses it; a new artefact has a new one."""

    policy: str
    """The policy's key in the configuration, see `policy_key`."""
    version: str
    """Of the artefact, its first 12 digits."""
    head: str
    """`PROMPT` or `CASCADE`."""


@dataclass(frozen=True)
class Score:
    """What one head said of one request."""

    by: HeadId
    gain: float
    """P(strong right) - P(weak right)."""
    chances: Mapping[str, float]
    """P(right) of each model that it compared."""


def policy_key(name: str) -> str:
    """Where the policy ``name`` stands in the configuration; "" is the section itself."""
    return f"routing.policies.{name}" if name else "routing"
