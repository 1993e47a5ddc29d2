"""Settings whose constants differ: bounds and times that no configuration file sets."""

from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel

SectionT = TypeVar("SectionT", bound=BaseModel)


def tuned(kind: type[SectionT], **values: Any) -> SectionT:
    """Return a section with these keys, and with these constants and properties in place of its own."""
    fields = {name: value for name, value in values.items() if name in kind.model_fields}
    constants = tuple((name, value) for name, value in values.items() if name not in fields)
    return _subclass(kind, constants)(**fields) if constants else kind(**fields)


@lru_cache
def _subclass(kind: type[SectionT], constants: tuple[tuple[str, Any], ...]) -> type[SectionT]:
    unknown = [name for name, _ in constants if not hasattr(kind, name)]
    assert not unknown, unknown
    own = {name: property(lambda _, value=value: value) for name, value in constants}
    return type(kind.__name__, (kind,), {"__module__": __name__, **own})
