"""Read settings from a file and the environment."""

import json
import os
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError as SourceError
from typing_extensions import override

from sluice.errors import SettingsError
from sluice.settings.mesh import Settings
from sluice.settings.problems import ENV_PREFIX, Lines, Place, joined, problems


def load(path: Path | None = None) -> Settings:
    """Return the settings of ``path``, or the defaults without one.

    Raises:
        SettingsError: the file cannot be read, is not YAML, or a key is unknown or has a value that cannot work.
    """
    if path is None:
        return parse({}, "settings")
    values, lines = _read(path)
    return parse(values, str(path), lines)


def parse(values: dict[str, Any], where: str, lines: Lines | None = None) -> Settings:
    """Return the settings of ``values``, which came from ``where``, and there from ``lines``.

    Raises:
        SettingsError: a key is unknown or has a value that cannot work; every such key is in the message.
    """
    try:
        return Settings(**values)
    except ValidationError as error:
        found = problems(error, Settings, lines=lines)
        raise SettingsError(joined(found, where)) from error
    except SourceError as error:
        raise SettingsError(_of_variable(error)) from error


def _of_variable(error: SourceError) -> str:
    """Name the environment variable that stands for a section or a list, and is not JSON."""
    for name, value in os.environ.items():
        section = name.upper().removeprefix(ENV_PREFIX).partition("__")[0].lower()
        if not name.upper().startswith(ENV_PREFIX) or f'"{section}"' not in str(error):
            continue
        try:
            json.loads(value)
        except ValueError:
            return f"{name}: is not JSON; write a section or a list as JSON, or set single keys ({name}__KEY)"
    return str(error)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, or is no plain word."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "braces make a section; put a placeholder in quotes", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> tuple[dict[str, Any], Lines]:
    """Return what is in the file, and on which lines."""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.load(text, _Loader)
        top = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise SettingsError(f"{path}: {where}is not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not YAML: {error}") from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: the top level must be a mapping")
    return values, dict(_lines_in(top, ()))


def _lines_in(node: yaml.Node | None, place: Place) -> Iterator[tuple[Place, int]]:
    """Yield where each value below ``node`` begins; that of a key is the line of the key."""
    below: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        below = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = [(number, value, value) for number, value in enumerate(node.value)]
    for part, start, value in below:
        inner = (*place, part)
        yield inner, start.start_mark.line + 1
        yield from _lines_in(value, inner)
