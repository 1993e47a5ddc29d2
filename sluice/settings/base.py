"""The base class of the sections of the configuration."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Part of the configuration: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
