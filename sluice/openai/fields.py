"""A JSON text that messages can carry, and its fields as those of a message, checked by type."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from google.protobuf.descriptor import FieldDescriptor


class BadField(ValueError):
    """A field that cannot be served; the message is "FIELD: what to do"."""


ENTRIES_MAX: Final = 2048
"""Of a list or of labels. No request may have more of anything; a gateway takes fewer of some."""

_KINDS: Final[Mapping[type, str]] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"
}  # fmt: skip
_OF_FIELDS: Final[Mapping[int, type]] = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}
"""Of what Python's types are fields that are no whole numbers."""

VALUES_MAX: Final = 65_536
"""Values in one JSON text. Each is an object in memory, and what reads a body reads all of them in the event loop."""
_STRING: Final = re.compile(r'"(?>(?:[^"\\]++|\\.)*)"?', re.DOTALL)
"""One that does not end is a match too: every quote is read once."""
_SURELY_FEW: Final = 1024
"""So many commas and brackets need no closer look, also where some are inside of strings."""
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Begins one half of a surrogate pair; most often the other half follows."""


def values_in(text: str) -> int:
    """About how many values the JSON ``text`` has, keys included, and never fewer; found without reading it."""
    most = sum(map(text.count, "[{,:"))
    if most > _SURELY_FEW:
        text = _STRING.sub("", text)
        most = sum(map(text.count, "[{,:"))
    return 1 + most


def load_json(text: str) -> Any:
    """The value of ``text``.

    Raises:
        ValueError: it is no JSON, has more than `VALUES_MAX` values, a number that JSON has not, or half a surrogate
            pair, which no message can carry.
        RecursionError: it is nested too deeply.
    """
    if values_in(text) > VALUES_MAX:
        raise ValueError(f"it has over {VALUES_MAX} values")
    value = _DECODER.decode(text)
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has halves of surrogate pairs") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
"""`json.loads` would make one for every text."""


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises BadField when ``value`` is not of ``kind``."""
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise BadField(f"{name}: is not {_KINDS[kind]}")


def check_entries(field: str, given: Any, kind: type | None = None) -> None:
    """Raises BadField where ``given`` has too many entries for any of them to be looked at, or is not of ``kind``."""
    if isinstance(given, list | dict) and len(given) > ENTRIES_MAX:
        raise BadField(f"{field}: has over {ENTRIES_MAX} entries")
    if kind is not None and not isinstance(given, kind):
        raise BadField(f"{field}: is no {'list' if kind is list else 'object'}")


def set_field(message: Any, name: str, value: Any, path: str = "") -> None:
    """Sets ``message.name``; ``path`` stands before the name in an error.

    Raises:
        BadField: it is not of the kind of the field, or does not fit.
    """
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    check_kind(f"{path}{name}", value, _OF_FIELDS.get(field.cpp_type, int))
    if name == "prompt" and not value:
        raise BadField(f"{path}{name}: is empty")
    try:
        setattr(message, name, value)
    except UnicodeError as error:
        raise BadField(f"{path}{name}: is not valid UTF-8") from error
    except ValueError as error:
        raise BadField(f"{path}{name}: {value} is out of range") from error
