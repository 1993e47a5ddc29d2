"""Read the objects in a body with pydantic, and name what is wrong in them by its path."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice.openai.fields import ENTRIES_MAX, BadField

_UNSUPPORTED: Final = "is not supported; leave it out"
_PROBLEMS: Final[Mapping[str, str]] = {
    "missing": "is required",
    "string_type": "is not text",
    "bool_type": "is not true or false",
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "dict_type": "is not an object",
    "model_type": "is not an object",
    "list_type": "is not a list",
    "extra_forbidden": _UNSUPPORTED,
    "literal_error": "must be one of {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "too_long": "has over {max_length} entries; send fewer",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "value_error": "{error}",
}
"""Descriptions by pydantic's type of an error; `{...}` is from its context."""

_T = TypeVar("_T")
Entries = Annotated[list[_T], Field(max_length=ENTRIES_MAX)]
"""A list of the length that requests may have."""


class Part(BaseModel):
    """An object in a body: null counts as absent, and fields that are not declared are errors."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, value: Any) -> Any:
        """Return an object without its nulls; return any other value unchanged."""
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}

    def declared_in(self, kind: type["Part"]) -> dict[str, Any]:
        """Return the fields that `kind`, a class of this object, declares."""
        return {name: getattr(self, name) for name in kind.model_fields}


_P = TypeVar("_P", bound=Part)


def read(
    kind: type[_P], value: Any, path: str = "", remedies: Mapping[str, str] | None = None
) -> _P:
    """Return the object in `value`.

    Args:
        kind: Declares the fields.
        value: The object as JSON has it.
        path: Path of the object in the body; empty for the body itself.
        remedies: What to do about a field whose value is not supported, by its path.

    Raises:
        BadField: A field is unknown, or its value is invalid.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as failed:
        error = failed.errors(include_url=False, include_input=False)[0]
    field = _path(path, error["loc"])
    described = _PROBLEMS.get(error["type"], error["msg"]).format_map(error.get("ctx", {}))
    problem = (remedies or {}).get(field, described)
    raise BadField(f"{field}: {problem}")


def _path(path: str, steps: Sequence[str | int]) -> str:
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")
