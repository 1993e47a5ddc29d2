"""What an installation with some extras of pyproject.toml would hold, as far as this environment holds it too."""

import importlib.metadata
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
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
def closure(extra: str = "") -> frozenset[str]:
    """All distributions that ``sluice-llm[extra]`` brings, those that others require included."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = set(named(extra))
    while waiting:
        one = waiting.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        environments = [{"extra": extra} for extra in ("", *one.extras)]
        if key in found or not is_installed(one.name):
            continue
        found.add(key)
        for inner in map(Requirement, importlib.metadata.requires(one.name) or ()):
            if inner.marker is None or any(map(inner.marker.evaluate, environments)):
                waiting.add(inner)
    return frozenset(name for name, _ in found)


def is_installed(distribution: str) -> bool:
    """Whether this environment holds it."""
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@cache
def modules(distributions: frozenset[str]) -> frozenset[str]:
    """Top-level modules that ``distributions`` provide."""
    return frozenset(
        module
        for module, names in packages_distributions().items()
        if {canonicalize_name(name) for name in names} & distributions
    )


@cache
def packages_distributions() -> Mapping[str, list[str]]:
    """The distributions that provide each top-level module of this environment; to find them takes a second."""
    return importlib.metadata.packages_distributions()


def absent(extra: str = "") -> frozenset[str]:
    """Top-level modules of this environment that ``sluice-llm[extra]`` does not bring."""
    here = {*packages_distributions(), *root_packages()}
    ours = root_packages() if extra else ("sluice", "cli")
    return frozenset(here - modules(closure(extra)) - set(ours))


def root_packages() -> tuple[str, ...]:
    """All packages of the tree."""
    return tuple(settings()["tool"]["importlinter"]["root_packages"])


def size_bytes(distributions: frozenset[str]) -> int:
    """Of their files."""
    files = [file for name in distributions for file in importlib.metadata.files(name) or ()]
    places = [Path(str(file.locate())) for file in files]
    return sum(place.stat().st_size for place in places if place.is_file())


def run_without(
    modules: frozenset[str], program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program to which ``modules`` do not exist."""
    hide = textwrap.dedent(
        f"""
        import importlib.abc, sys

        class Absent(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] in {sorted(modules)!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Absent())
        """
    )
    return subprocess.run(
        [sys.executable, "-c", hide + textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
