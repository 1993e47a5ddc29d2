"""What an installation with some extras of pyproject.toml would hold, as far as this environment holds it too."""

import importlib.metadata
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[2]
_OURS: Final = ("sluice-llm", "sluice-llm-mesh")


@cache
def settings() -> Any:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def named(extra: str = "") -> frozenset[Requirement]:
    """What ``sluice-llm[extra]`` requires by name, by the extras it includes too; ours are left out."""
    project = settings()["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"].get(extra, ())]
    wanted = frozenset(map(Requirement, lines))
    included = {extra for one in wanted if one.name == _OURS[0] for extra in one.extras}
    return frozenset(one for one in wanted if one.name not in _OURS).union(*map(named, included))


@cache
def modules(distributions: frozenset[str]) -> frozenset[str]:
    """Top-level modules that ``distributions`` provide."""
    return frozenset(
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in names} & distributions
    )


def root_packages() -> tuple[str, ...]:
    """All packages of the tree."""
    return tuple(settings()["tool"]["importlinter"]["root_packages"])
