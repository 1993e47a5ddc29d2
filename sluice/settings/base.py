"""The base class of the sections of the configuration, and the kinds of their values."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from sluice.settings.problems import value_text

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
        """Refuse a switch, which pydantic reads as 0 or 1, and an octal number where a number belongs."""
        kinds = {*_kinds(cls.model_fields[str(info.field_name)].annotation)}
        if not kinds & {int, float} or bool in kinds:
            return value
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, bool):
                raise ValueError(f"{value_text(part)} is a switch, not a number; write a number")
            if isinstance(part, str) and _OCTAL.fullmatch(part):
                raise ValueError(f"{part} may be read as octal; write it without zeros in front")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield what an annotation is made of."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from _kinds(part)
