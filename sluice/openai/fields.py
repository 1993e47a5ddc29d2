"""A JSON text that messages can carry, and its fields as those of a message, checked by type."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from google.protobuf.descriptor import FieldDescriptor


class BadField(ValueError):
    """A field that cannot be served; the message is "FIELD: what to do"."""


class BadJson(ValueError):
    """A text that is no JSON, or none that a message can carry; the message goes on behind the name of the text."""


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
_SHOWN_MAX: Final = 40
"""Characters of a number that an error quotes."""
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Begins one half of a surrogate pair; most often the other half follows."""


def values_in(text: str) -> int:
    """About how many values the JSON ``text`` has, keys included, and never fewer; found without reading it."""
    most = sum(map(text.count, "[{,:"))
    if most > _SURELY_FEW:
        text = _STRING.sub("", text)
        most = sum(map(text.count, "[{,:"))
    return 1 + most


def load_json(text: str, *, strict: bool = True) -> Any:
    """Return the value of ``text``; unless ``strict`` its strings may have control characters.

    Raises:
        BadJson: it is no JSON, is nested too deeply, has more than `VALUES_MAX` values, a number that JSON has not, or
            half a surrogate pair, which no message can carry.
    """
    if values_in(text) > VALUES_MAX:
        raise BadJson(f"has over {VALUES_MAX} values; send fewer")
    try:
        value = (_DECODER if strict else _LENIENT_DECODER).decode(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadJson(f"is not JSON at line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise BadJson("has half a surrogate pair; send whole characters") from None
    except RecursionError:
        raise BadJson("is nested too deeply; send fewer levels") from None
    except BadJson:
        raise
    except ValueError:  # an integer with more digits than Python reads
        raise BadJson(f"has a number of over {sys.get_int_max_str_digits()} digits") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise BadJson(f"has {name}, which is no JSON value; leave it out")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
"""`json.loads` would make one for every text."""
_LENIENT_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, strict=False)


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
        raise BadField(f"{field}: is not {'a list' if kind is list else 'an object'}")


def set_field(message: Any, name: str, value: Any, path: str = "") -> None:
    """Sets ``message.name``; ``path`` stands before the name in an error.

    Raises:
        BadField: it is not of the kind of the field, or does not fit.
    """
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    value = _fitting(field, value, f"{path}{name}")
    if name == "prompt" and not value:
        raise BadField(f"{path}{name}: is empty")
    with _setting(f"{path}{name}", value):
        setattr(message, name, value)


def add_value(values: Any, value: Any, field: FieldDescriptor, path: str) -> None:
    """Append ``value`` to the ``values`` of a repeated ``field``; raise as `set_field`."""
    value = _fitting(field, value, path)
    with _setting(path, value):
        values.append(value)


def _fitting(field: FieldDescriptor, value: Any, path: str) -> Any:
    """Return ``value`` as one of the kind of ``field``; JSON does not tell 16.0 from 16."""
    kind = _OF_FIELDS.get(field.cpp_type, int)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    check_kind(path, value, kind)
    return value


@contextmanager
def _setting(path: str, value: Any) -> Iterator[None]:
    """Turn what protobuf raises for a ``value`` that does not fit into BadField."""
    try:
        yield
    except UnicodeError:
        raise BadField(f"{path}: is not valid UTF-8") from None
    except (ValueError, OverflowError):
        raise BadField(f"{path}: {str(value)[:_SHOWN_MAX]} is out of range") from None
