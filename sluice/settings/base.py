"""The base class of the sections of the configuration, and the kinds of their values."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from sluice.settings.problems import PLACEHOLDER, shown

NAME_MAX: Final = 64
NUMBER_MAX: Final = 1e9
"""Bound of numbers without one of their own: as seconds 31 years, which every timer still takes."""
BYTES_MAX: Final = 2**56
"""Bound of sizes: sums of several still fit the 64 bits that NATS counts with."""
Name = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_-]{{1,{NAME_MAX}}}$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Whole = Annotated[int, Field(ge=0, le=2**53)]
MebibytesOrNone = Annotated[int, Field(ge=0, le=BYTES_MAX // 1024**2)]
Positive = Annotated[float, Field(gt=0, le=NUMBER_MAX)]
PositiveOrInfinite = Annotated[float, Field(gt=0, allow_inf_nan=True)]
NotNegative = Annotated[float, Field(ge=0, le=NUMBER_MAX)]
Share = Annotated[float, Field(gt=0, le=1)]

_OCTAL: Final = re.compile(r"\s*[-+]?0[0-9_]*[0-9]\s*")


class Section(BaseModel):
    """Part of the configuration: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what a field would take although it is not what somebody wants to say."""
        check_meaning(value, cls.model_fields[str(info.field_name)])
        return value


def check_meaning(value: Any, field: FieldInfo) -> None:
    """Refuse placeholders, and for numbers also switches and octal numbers, inside lists and mappings too.

    Raises:
        ValueError: says which, and what to write.
    """
    is_number = _takes_numbers(field)
    for part in _parts(value, field):
        if isinstance(part, str) and (found := PLACEHOLDER.search(part)):
            raise ValueError(f"{found[0]} is a placeholder that was not filled in; write the value")
        if isinstance(part, bool) and is_number:
            raise ValueError(f"{shown(part)} is a switch, not a number; write a number")
        if isinstance(part, str) and _OCTAL.fullmatch(part) and is_number:
            raise ValueError(f"{part} may be read as octal; write it without zeros in front")


def _parts(value: Any, field: FieldInfo) -> Iterator[Any]:
    """Yield a value, or what a list or mapping consists of, but not the values of sections: they check theirs."""
    if isinstance(value, dict):
        value = () if _takes_sections(field) else value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        yield value
        return
    for part in value:
        yield from _parts(part, field)


def _takes_sections(field: FieldInfo) -> bool:
    kinds = _kinds(field.annotation)
    return any(
        kind is Any or (isinstance(kind, type) and issubclass(kind, Section)) for kind in kinds
    )


def _takes_numbers(field: FieldInfo) -> bool:
    """Tell whether the values of a field are numbers, and no switches."""
    kinds = [*_kinds(field.annotation)]
    return (int in kinds or float in kinds) and bool not in kinds


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield what an annotation is made of."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from _kinds(part)
