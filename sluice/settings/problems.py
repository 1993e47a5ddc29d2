"""Word what is wrong in a configuration: every problem, by key and line, with what to do about it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Self, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Place = tuple[str | int, ...]
"""Keys and positions from the top of the configuration down to a value."""
Lines = Mapping[Place, int]
"""Where a file has each value, line numbers from 1."""
_SHOWN_CHARS: Final = 60
_KEYS_SHOWN: Final = 20

PLACEHOLDER: Final = re.compile(r"\{\{-?[\w\s.$|\"'()-]+\}\}|\{%.*?%\}|\$\{\w+(?::?-[^}]*)?\}")
"""What templates of Helm, Jinja, Ansible and shells look like before somebody fills them in."""

NOT_FILLED_IN: Final = "is a placeholder that was not filled in; write the value"
_SHAPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type", "mapping_type"),
        "should be a section; write keys below it, or JSON in a variable",
    ),
    **dict.fromkeys(
        ("tuple_type", "list_type", "set_type", "frozen_set_type"),
        "should be a list; write [...], also in a variable",
    ),
    "missing": "is missing",
}
"""By the type of pydantic's error; of others pydantic's own words are used."""


@dataclass(frozen=True)
class Problem:
    """A value that cannot work.

    Attributes:
        place: where it is; empty: nowhere in particular.
        text: what is wrong with it, and what to do.
        origin: the variable that it came from; empty: the file has it, or nothing.
    """

    place: Place
    text: str
    origin: str = ""

    @classmethod
    def of(cls, line: str) -> Self:
        """Return the problem that a line "KEY: TEXT" describes."""
        key, _, text = line.partition(": ")
        return cls(_parts_of(key), text) if text else cls((), line)

    @property
    def line(self) -> str:
        """The problem in one line, after the key."""
        return ": ".join(filter(None, (".".join(map(str, self.place)), self.text)))


Origin = Callable[[Place], str]
"""Gives the variable that a value came from; empty without one."""


def problems(error: ValidationError, model: type[BaseModel], *above: str) -> list[str]:
    """Describe each problem of `model`, which is below the keys `above`, in one line."""
    return [Problem((*above, *entry.place), entry.text).line for entry in problems_of(error, model)]


def problems_of(
    error: ValidationError, model: type[BaseModel], origin_of: Origin = lambda _: ""
) -> list[Problem]:
    """Return what is wrong with the values of `model`, each problem once."""
    problems: dict[Problem, None] = {}
    for details in error.errors():
        # pydantic's "[key]" stands for a key of a mapping that is wrong itself.
        place = tuple(part for part in details["loc"] if part != "[key]")
        origin = origin_of(place[:-1] if details["type"] == "missing" else place)
        for text in _text(details, model).splitlines():
            key, words = _key_in(text, model, place)
            problems[Problem((*place, *key), words, origin)] = None
    return list(problems)


def _key_in(text: str, model: type[BaseModel], place: Place) -> tuple[Place, str]:
    """Take the key off a text that begins with one: checks of a whole section say which of its values is wrong."""
    key, _, words = text.partition(": ")
    parts = _parts_of(key)
    is_key = words and _field_at(model, (*place, parts[0]))[1]
    return (parts, words) if is_key else ((), text)


def _parts_of(key: str) -> Place:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def joined(problems: Sequence[Problem], where: str, lines: Lines) -> str:
    """Return one message: one line for one problem, else a line for each, in the order of the file.

    Args:
        problems: The problems, in any order.
        where: What to call the file.
        lines: Where the file has its values.
    """
    ordered = sorted(problems, key=lambda entry: 0 if entry.origin else _line(entry.place, lines))
    if len(ordered) == 1:
        return f"{ordered[0].origin or where}: {_located(ordered[0], lines)}"
    places = [where] if not all(entry.origin for entry in ordered) else []
    places += ["environment"] if any(entry.origin for entry in ordered) else []
    located = (": ".join(filter(None, (entry.origin, _located(entry, lines)))) for entry in ordered)
    return "\n  ".join([f"{' and '.join(places)}: {len(ordered)} problems", *located])


def _located(problem: Problem, lines: Lines) -> str:
    line = 0 if problem.origin else _line(problem.place, lines)
    return f"line {line}: {problem.line}" if line else problem.line


def _line(place: Place, lines: Lines) -> int:
    """Return the line of the value, or of the nearest section that the file has; 0 without one."""
    return next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 0)


def _text(problem: Any, model: type[BaseModel]) -> str:
    """Return what is wrong, in pydantic's words where those say it."""
    models, field = _field_at(model, problem["loc"])
    kind, message = problem["type"], str(problem["msg"])
    if kind == "extra_forbidden":
        return _unknown(str(problem["loc"][-1]), models)
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    # "Input should be a valid integer, unable to parse string as an integer".
    rule = f"should {message.partition(' should ')[2].partition(', unable')[0]}"
    words = _SHAPES.get(kind, rule if " should " in message else message)
    is_hidden = kind == "missing" or (field is not None and not field.repr)
    return words if is_hidden else f"{value_text(problem['input'])} {words}"


def value_text(value: Any) -> str:
    """Return a value as a file has it, without passwords in addresses."""
    text = repr(value) if isinstance(value, str) else str(value)
    if value is None:
        text = "null"
    if isinstance(value, bool):
        text = text.lower()
    text = re.sub(r"//[^/@]*@", "//...@", text)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _unknown(name: str, models: Sequence[type[BaseModel]]) -> str:
    """Say which key may be meant instead of one that is none."""
    keys = list(dict.fromkeys(key for section in models for key in section.model_fields))
    if close := get_close_matches(name, keys, n=2):
        return f"no such key; did you mean {' or '.join(close)}?"
    if not keys:
        return "no such key"
    more = ", ..." if len(keys) > _KEYS_SHOWN else ""
    return f"no such key; there are {', '.join(keys[:_KEYS_SHOWN])}{more}"


def _field_at(
    model: type[BaseModel], location: Sequence[str | int]
) -> tuple[list[type[BaseModel]], FieldInfo | None]:
    """Return the sections that the last key of `location` is in, and its field where it is one."""
    models, field, inside = [model], None, [model]
    for part in location:
        declared = [kind.model_fields[str(part)] for kind in inside if part in kind.model_fields]
        models = inside
        field = declared[0] if declared else None
        if declared:
            inside = [kind for info in declared for kind in _models_in(info.annotation)]
        # Else it is a position in a list, a name in a mapping, or one of several forms: the sections stay.
    return models, field


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
