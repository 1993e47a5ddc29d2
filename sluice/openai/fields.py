"""Parse JSON within bounds, and set its fields in protobuf messages, checked by type."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from google.protobuf.descriptor import FieldDescriptor


class BadField(ValueError):
    """A field that is unsupported or invalid; the message is "FIELD: what to do"."""


class BadJson(ValueError):
    """A text that is not JSON or exceeds a bound.

    The message is a predicate such as "is not JSON at line 1, column 2"; the caller puts the subject before it.
    """


ENTRIES_MAX: Final = 2048
"""Most entries of any list or object in a request. The gateway allows fewer for some."""

_KINDS: Final[Mapping[type, str]] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
}
_PYTHON_TYPES: Final[Mapping[int, type]] = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_STRING: str,
}
"""Python types of protobuf fields; the others are int."""

VALUES_MAX: Final = 65_536
"""Most values in one JSON text. Each becomes an object, and the event loop is blocked while all are read."""
_STRING: Final = re.compile(r'"(?>(?:[^"\\]++|\\.)*)"?', re.DOTALL)
"""A JSON string. An unterminated one matches too, so that matching takes linear time."""
_QUICK_COUNT_MAX: Final = 1024
"""Up to this many separators, those inside of strings are counted as well, which is faster."""
_SHOWN_MAX: Final = 40
"""Most characters of a number that an error quotes."""
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of one half of a surrogate pair; usually the other half follows."""


def values_in(text: str) -> int:
    """Return an upper bound for the number of values, keys included, in the JSON `text`, without parsing it."""
    separators = sum(map(text.count, "[{,:"))
    if separators > _QUICK_COUNT_MAX:
        text = _STRING.sub("", text)
        separators = sum(map(text.count, "[{,:"))
    return 1 + separators


def load_json(text: str, *, strict: bool = True) -> Any:
    """Return the value of the JSON `text`; unless `strict`, its strings may have control characters.

    Raises:
        BadJson: It is not JSON, is nested too deeply, has more than `VALUES_MAX` values, or has a number or half a
            surrogate pair that protobuf cannot encode.
    """
    if values_in(text) > VALUES_MAX:
        raise BadJson(f"has over {VALUES_MAX} values; send fewer")
    try:
        value = (_DECODER if strict else _LENIENT_DECODER).decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadJson(f"is not JSON at line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise BadJson("has half a surrogate pair; send whole characters") from None
    except RecursionError:
        raise BadJson("is nested too deeply; send fewer levels") from None
    except BadJson:
        raise
    except ValueError:  # an integer with more digits than Python parses
        raise BadJson(f"has a number of over {sys.get_int_max_str_digits()} digits") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise BadJson(f"has {name}, which is not a JSON value; leave it out")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)
"""Created once: `json.loads` would create one for every text."""
_LENIENT_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, strict=False)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise BadField if `value` is not of type `kind`."""
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise BadField(f"{name}: is not {_KINDS[kind]}")


def check_entries(field: str, value: Any, kind: type | None = None) -> None:
    """Raise BadField if `value` has over `ENTRIES_MAX` entries, or is not of type `kind`."""
    if isinstance(value, list | dict) and len(value) > ENTRIES_MAX:
        raise BadField(f"{field}: has over {ENTRIES_MAX} entries; send fewer")
    if kind is not None and not isinstance(value, kind):
        raise BadField(f"{field}: is not {'a list' if kind is list else 'an object'}")


def set_field(message: Any, name: str, value: Any, path: str = "") -> None:
    """Set the field `name` of `message`; `path` precedes the name in an error.

    Raises:
        BadField: The value is not of the field's type, or out of range.
    """
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    value = _fitting(field, value, f"{path}{name}")
    if name == "prompt" and not value:
        raise BadField(f"{path}{name}: is empty")
    with _setting(f"{path}{name}", value):
        setattr(message, name, value)


def add_value(values: Any, value: Any, field: FieldDescriptor, path: str) -> None:
    """Append `value` to the `values` of a repeated field; raise as `set_field`."""
    value = _fitting(field, value, path)
    with _setting(path, value):
        values.append(value)


def _fitting(field: FieldDescriptor, value: Any, path: str) -> Any:
    """Return `value` as the field's type; JSON does not distinguish 16.0 from 16."""
    kind = _PYTHON_TYPES.get(field.cpp_type, int)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    check_kind(path, value, kind)
    return value


@contextmanager
def _setting(path: str, value: Any) -> Iterator[None]:
    """Turn what protobuf raises for an invalid `value` into BadField."""
    try:
        yield
    except UnicodeError:
        raise BadField(f"{path}: is not valid UTF-8") from None
    except (ValueError, OverflowError):
        raise BadField(f"{path}: {str(value)[:_SHOWN_MAX]} is out of range") from None
