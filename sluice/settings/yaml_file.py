"""Read a configuration file: YAML whose keys are plain words, with the line of each value.

Words mean what they mean in YAML 1.2, so that 010, 1:20 and 2024-01-01 are text. As in YAML 1.1, yes, no, on and off
are switches, and `<<` takes the keys of another mapping over.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from sluice.errors import SettingsError
from sluice.settings.problems import PLACEHOLDER, Lines, Place

VALUES_MAX: Final = 100_000
"""Limits how many values a file may have, those that aliases repeat included."""

_TAG: Final = "tag:yaml.org,2002:"
_MERGE: Final = f"{_TAG}merge"
_TEXT: Final = f"{_TAG}str"
_TEMPLATE: Final = re.compile(r"\{\{|\{%|\$\{")
_REMEDIES: Final = (
    ("'\\t'", "indent with spaces, not with tabs"),
    ("another document", "keep one document and leave out the lines ---"),
    ("constructor for the tag", "leave out the tag"),
    ("mapping values are not allowed", "put text that has a colon in quotes"),
    ("undefined alias", "put text that begins with * in quotes"),
)
"""What to do, by a part of the parser's words."""


class _Words(yaml.resolver.BaseResolver):
    """What unquoted words stand for."""


for _name, _pattern, _first in (
    (
        "bool",
        "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        "yYnNtTfFoO",
    ),
    ("int", "[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+", "-+0123456789"),
    (
        "float",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    _Words.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))


class _Loader(
    yaml.reader.Reader,
    yaml.scanner.Scanner,
    yaml.parser.Parser,
    yaml.composer.Composer,
    yaml.constructor.SafeConstructor,
    _Words,
):
    """The safe loader of PyYAML with `_Words`."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        yaml.constructor.SafeConstructor.__init__(self)
        _Words.__init__(self)


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Return the values of a file, and on which lines they are.

    Raises:
        SettingsError: it cannot be read, or is no mapping in YAML; the message says where, and what to do.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read: {error.strerror}; name a YAML file"
        ) from error
    try:
        return _parse(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        problem = (
            f"line {line}: is not UTF-8 (byte {content[error.start]:#x}); save the file as UTF-8"
        )
    except _Refused as error:
        problem = str(error)
    except RecursionError:
        problem = "is nested too deeply; use at most a hundred levels"
    raise SettingsError(f"{path}: {problem}")


class _Refused(Exception):
    """What is wrong, after the path."""


def _parse(text: str) -> tuple[dict[str, Any], Lines]:
    lines: dict[Place, int] = {}
    try:
        loader = _Loader(text)
        top = loader.get_single_node()
        for place, line in _Walk(text).values(top, ()):
            lines.setdefault(place, line)
        values = None if top is None else loader.construct_document(top)
    except yaml.MarkedYAMLError as error:
        raise _Refused(_worded(error, text)) from error
    except yaml.reader.ReaderError as error:
        line = 1 + text.count("\n", 0, error.position)
        raise _Refused(f"line {line}: has a control character; remove it") from error
    except ValueError as error:
        raise _Refused(f"is not YAML: {error}") from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise _Refused("must be a mapping; write sections such as models: and gateway:")
    return values, lines


def _worded(error: yaml.MarkedYAMLError, text: str) -> str:
    mark, problem = error.problem_mark, error.problem or ""
    if mark is None:
        return f"is not YAML: {problem}"
    lines = text.splitlines()
    source = lines[mark.line] if mark.line < len(lines) else ""
    remedy = next((words for part, words in _REMEDIES if part in problem), "")
    if _TEMPLATE.search(source):
        remedy = "fill in the placeholders of this template first, or put the text in quotes"
    return f"{_at(mark)}: is not YAML: {problem}{remedy and f'; {remedy}'}"


def _at(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


class _Walk:
    """Goes through the nodes of a file once: makes keys text, finds lines, and refuses what no configuration has."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._count = 0
        self._above: list[yaml.Node] = []

    def values(self, node: yaml.Node | None, place: Place) -> Iterator[tuple[Place, int]]:
        """Yield where each value below `node` begins; that of a key is the line of the key.

        Raises:
            _Refused: a key is no word or stands twice, an alias contains itself, or there are too many values.
        """
        if any(node is above for above in self._above):
            assert node is not None
            raise _Refused(
                f"{_at(node.start_mark)}: contains itself through an alias; write the values out"
            )
        if not isinstance(node, yaml.CollectionNode):
            return
        self._above.append(node)
        own, taken_over = self._below(node)
        for part, start, value in own:
            self._count += 1
            if self._count > VALUES_MAX:
                raise _Refused(f"has more than {VALUES_MAX} values with its aliases; write fewer")
            yield (*place, part), start.start_mark.line + 1
            yield from self.values(value, (*place, part))
        for value in taken_over:
            yield from self.values(value, place)
        self._above.pop()

    def _below(
        self, node: yaml.CollectionNode
    ) -> tuple[list[tuple[str | int, yaml.Node, yaml.Node]], list[yaml.Node]]:
        """Return the entries of a node, each with where it starts, and the mappings whose keys it takes over."""
        if not isinstance(node, yaml.MappingNode):
            return [(number, value, value) for number, value in enumerate(node.value)], []
        merged = [value for key, value in node.value if key.tag == _MERGE]
        keys = [(key, value) for key, value in node.value if key.tag != _MERGE]
        self._check_keys([key for key, _ in keys])
        for key, _ in keys:
            key.tag = _TEXT
        return [(key.value, key, value) for key, value in keys], merged

    def _check_keys(self, keys: list[yaml.Node]) -> None:
        seen = set[str]()
        for key in keys:
            if not isinstance(key, yaml.ScalarNode):
                raise _Refused(f"{_at(key.start_mark)}: {self._no_key(key)}")
            if key.value in seen:
                raise _Refused(
                    f"{_at(key.start_mark)}: {key.value} is there twice; keep one of them"
                )
            seen.add(key.value)

    def _no_key(self, key: yaml.Node) -> str:
        line = self._text.splitlines()[key.start_mark.line]
        found = PLACEHOLDER.search(line, max(0, key.start_mark.column - 1))
        if found is not None:
            return f"{found[0]} is a placeholder that was not filled in; write the value"
        return "is not a key: keys are words; put text that begins with { or [ in quotes"
