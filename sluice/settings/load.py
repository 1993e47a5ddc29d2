"""Read settings from a file and the environment."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sluice.errors import SettingsError
from sluice.settings.environment import Variable, read_variables, unknown_variables
from sluice.settings.mesh import Settings
from sluice.settings.problems import Lines, Place, Problem, joined, problems_of
from sluice.settings.yaml_file import read_yaml


def load(path: Path | None = None) -> Settings:
    """Return the settings of `path`, or the defaults without one.

    Raises:
        SettingsError: the file cannot be read, is not YAML, or a key is unknown or has a value that cannot work.
    """
    if path is None:
        return parse({}, "settings")
    values, lines = read_yaml(path)
    return parse(values, str(path), lines)


def parse(values: dict[str, Any], where: str, lines: Lines | None = None) -> Settings:
    """Return the settings of `values`, which came from `where`, and there from `lines`.

    Raises:
        SettingsError: a key is unknown or has a value that cannot work; every such key is in the message.
    """
    variables = read_variables()
    problems = unknown_variables(variables, Settings)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems += _all_problems(error, values, variables)
    if problems:
        raise SettingsError(joined(problems, where, lines or {}))
    return settings


def refuse(problems: Iterable[Problem], path: Path | None) -> None:
    """Raise SettingsError for problems with the settings of `path` that somebody else has found, if there are any."""
    variables = read_variables()
    located = [replace(entry, origin=_origin_of(entry.place, variables)) for entry in problems]
    if located:
        lines = {} if path is None else read_yaml(path)[1]
        raise SettingsError(joined(located, str(path or "settings"), lines))


def _origin_of(place: Place, variables: Sequence[Variable]) -> str:
    return next((variable.origin for variable in variables if place and variable.sets(place)), "")


def _all_problems(
    error: ValidationError, values: dict[str, Any], variables: Sequence[Variable]
) -> list[Problem]:
    """Describe what is wrong, also between the sections that are right by themselves.

    Sections are compared once each of them is right. So those that are not are left out for a second look; without
    the models there is nothing to compare with.
    """
    origin_of = partial(_origin_of, variables=variables)
    problems = problems_of(error, Settings, origin_of)
    wrong = {problem.place[0] for problem in problems if problem.place}
    if "models" in wrong or not wrong & values.keys():
        return problems
    try:
        Settings(**{key: value for key, value in values.items() if key not in wrong})
    except ValidationError as second:
        more = problems_of(second, Settings, origin_of)
        problems += [problem for problem in more if not wrong.intersection(problem.place[:1])]
    return problems
