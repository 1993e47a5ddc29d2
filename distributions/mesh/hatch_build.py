"""Puts the packages of the processes into the wheel; an editable installation finds them in the tree."""

import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[2]


class Packages(BuildHookInterface):
    """All packages of the tree but those of the other distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel of the kind `version`."""
        if version == "editable":
            return
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        tools = project["tool"]
        client = tools["hatch"]["build"]["targets"]["wheel"]["packages"]
        for package in tools["importlinter"]["root_packages"]:
            if package not in client:
                build_data["force_include"][str(ROOT / package)] = package
