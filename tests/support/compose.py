"""The files of compose/ as tests look at them: parsed, and with the variables of .env filled in."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "compose"
COMPOSE_FILES: Final = (
    "compose.yaml",
    "compose.gpu.yaml",
    "compose.secure.yaml",
    "compose.sampling.yaml",
    "compose.proxy.yaml",
)
_VARIABLE: Final = re.compile(r"(?<!\$)\$\{([A-Z_]+):\?see \.env\}")


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


def services(name: str = "compose.yaml") -> dict[str, dict[str, Any]]:
    """The services of a compose file."""
    found: dict[str, dict[str, Any]] = compose(name)["services"]
    return found


OVERLAYS: Final = ("base", "gpu", "keda", "keda-bulk", "laptop", "secure")


@cache
def manifests(overlay: str = "base") -> tuple[dict[str, Any], ...]:
    """The Kubernetes objects of an overlay, as kubectl renders them; the test is skipped without kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    folder = FOLDER / "kubernetes" / overlay
    ran = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return tuple(yaml.safe_load_all(ran.stdout))


def pod_specs(overlay: str = "base") -> dict[str, dict[str, Any]]:
    """The pod of each workload, by name."""
    return {
        item["metadata"]["name"]: item["spec"]["template"]
        for item in manifests(overlay)
        if "template" in item.get("spec", {})
    }


def pod_containers(overlay: str = "base") -> dict[str, dict[str, Any]]:
    """The one container of each workload, by name."""
    return {name: pod["spec"]["containers"][0] for name, pod in pod_specs(overlay).items()}


def named(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind, by name; of a generated one without its hash."""
    generated = kind == "ConfigMap"
    return {
        item["metadata"]["name"].rpartition("-")[0] if generated else item["metadata"]["name"]: item
        for item in manifests(overlay)
        if item["kind"] == kind
    }
