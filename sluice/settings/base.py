"""The base class of the sections of the configuration."""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

NAME_MAX: Final = 64
Name = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_-]{{1,{NAME_MAX}}}$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Part of the configuration: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
