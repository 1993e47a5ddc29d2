"""Read settings from variables: of the environment, and of containers, which mount secrets as files.

`SLUICE_NATS__URL` sets `nats.url`. An empty variable is not set: charts render values that nobody gave as such.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource
from typing_extensions import override

from sluice.errors import SettingsError
from sluice.settings.problems import NOT_FILLED_IN, PLACEHOLDER, Place, Problem

PREFIX: Final = "SLUICE_"
DELIMITER: Final = "__"
SECRETS: Final = "SLUICE_SECRETS"
"""The variable with the folder of secrets: a file each, called like the variable."""


@dataclass(frozen=True)
class Variable:
    """A setting that is not in the file.

    Attributes:
        place: the keys that its name spells.
        value: as it is written.
        origin: what errors call it.
    """

    place: Place
    value: str
    origin: str

    @property
    def name(self) -> str:
        """What the environment calls it."""
        return name_of(self.place)

    def sets(self, place: Place) -> bool:
        """Tell whether the value at `place` came from here."""
        lowered = tuple(str(part).lower() for part in place)
        if len(lowered) <= len(self.place):
            return self.place[: len(lowered)] == lowered
        below = place[len(self.place) :]
        named = all(isinstance(part, int) or f'"{part}"' in self.value for part in below)
        return self.place == lowered[: len(self.place)] and named


def read_variables() -> Sequence[Variable]:
    """Return the variables of the environment, then those of secrets; of two with the same name the first one counts.

    Raises:
        SettingsError: the folder of secrets, or a file of it, cannot be read, or a value is a placeholder.
    """
    return [*_named(os.environ, ""), *_named(_secrets(), f"{os.environ.get(SECRETS)}/")]


def _named(values: Mapping[str, str], folder: str) -> Iterator[Variable]:
    for name, value in values.items():
        if name.upper().startswith(PREFIX) and value:
            if match := PLACEHOLDER.search(value):
                raise SettingsError(f"{folder}{name}: {match[0]} {NOT_FILLED_IN}")
            parts = name[len(PREFIX) :].lower().split(DELIMITER)
            yield Variable(tuple(parts), value, folder + name)


def _secrets() -> Mapping[str, str]:
    folder = os.environ.get(SECRETS)
    if not folder:
        return {}
    try:
        files = [file for file in Path(folder).iterdir() if file.name.startswith(PREFIX)]
        return {file.name: file.read_text(errors="replace").strip() for file in files}
    except OSError as error:
        raise SettingsError(
            f"{SECRETS}: {error.filename}: cannot be read: {error.strerror}"
        ) from error


class VariableSource(EnvSettingsSource):
    """Gives variables to the settings; values that are no JSON stay text, which sections and lists refuse."""

    def __init__(self, settings: type[BaseSettings], variables: Sequence[Variable]) -> None:
        super().__init__(settings)
        self.env_vars = {variable.name.lower(): variable.value for variable in reversed(variables)}

    @override
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


def unknown_variables(variables: Sequence[Variable], settings: type[BaseSettings]) -> list[Problem]:
    """Describe the variables that look like settings and set none, because a part of their name is misspelt."""
    names = [name_of(place) for place in _places(settings, ())]
    by_letters = {name.replace(DELIMITER, "_"): name for name in names}
    problems: list[Problem] = []
    for variable in variables:
        section, *below = variable.place
        if section in settings.model_fields or _is_link(variable):
            continue
        meant = by_letters.get(variable.name)
        if meant is None and below:
            close = get_close_matches(str(section), settings.model_fields, n=1)
            meant = name_of((*close, *below)) if close else None
        if meant or below:
            sections = f"sections are {', '.join(settings.model_fields)}"
            hint = f"did you mean {meant}?" if meant else sections
            problems.append(Problem(variable.place, f"no such key; {hint}", variable.origin))
    return problems


def name_of(place: Place) -> str:
    """Return the variable that sets the value at `place`."""
    return PREFIX + DELIMITER.join(map(str, place)).upper()


def _is_link(variable: Variable) -> bool:
    """Tell whether Kubernetes has set it: SLUICE_NATS_PORT=tcp://10.0.0.1:4222 for a service called sluice-nats."""
    return variable.name.endswith("_PORT") and "://" in variable.value


def _places(model: type[BaseModel], above: Place) -> Iterator[Place]:
    """Yield where variables may set single values: below sections, not in lists and mappings."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _places(part, (*above, name))
