"""Fields of a JSON body become those of a message, checked by type."""

from collections.abc import Mapping
from typing import Any, Final


class BadField(ValueError):
    """A field that cannot be served; the message is "FIELD: what to do"."""


_KINDS: Final[Mapping[type, str]] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number"
}  # fmt: skip


def set_field(message: Any, name: str, value: Any, kind: type, path: str = "") -> None:
    """Sets ``message.name``; ``path`` stands before the name in an error.

    Raises:
        BadField: it is not of ``kind``, or does not fit.
    """
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise BadField(f"{path}{name}: is not {_KINDS[kind]}")
    if kind is str and not value and name == "prompt":
        raise BadField(f"{path}{name}: is empty")
    try:
        setattr(message, name, value)
    except UnicodeError as error:
        raise BadField(f"{path}{name}: is not valid UTF-8") from error
    except ValueError as error:
        raise BadField(f"{path}{name}: {error}") from error
