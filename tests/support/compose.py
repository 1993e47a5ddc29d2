"""The files of compose/ as tests look at them: parsed, and with the variables of .env filled in."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "compose"
COMPOSE_FILES: Final = ("compose.yaml", "compose.gpu.yaml")
_VARIABLE: Final = re.compile(r"(?<!\$)\$\{([A-Z_]+)\}")


@cache
def variables() -> dict[str, str]:
    """The entries of .env."""
    lines = (FOLDER / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def used_variables(text: str) -> set[str]:
    """Names of the variables that compose would fill into ``text``."""
    without_comments = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return set(_VARIABLE.findall(without_comments))


@cache
def compose(name: str = "compose.yaml") -> dict[str, Any]:
    """A compose file as compose reads it."""
    return filled(name, variables())


def filled(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """A compose file with ``values`` for its variables, and ``$$`` a dollar sign."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    document = yaml.safe_load(
        _VARIABLE.sub(lambda match: values[match[1]], text).replace("$$", "$")
    )
    assert isinstance(document, dict)
    return document


def services() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml."""
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


@cache
def manifests() -> tuple[dict[str, Any], ...]:
    """The Kubernetes objects that kustomization.yaml names, in its order."""
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return tuple(
        document
        for name in names
        for document in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    )


def pod_containers() -> dict[str, dict[str, Any]]:
    """The one container of each workload, by name."""
    specs = [
        item["spec"]["template"]["spec"]
        for item in manifests()
        if "template" in item.get("spec", {})
    ]
    return {spec["containers"][0]["name"]: spec["containers"][0] for spec in specs}
