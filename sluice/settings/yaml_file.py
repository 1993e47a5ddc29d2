"""Read a configuration file: YAML whose keys are plain words, with the line of each value.

Numbers mean what they mean in YAML 1.2, so that 010, 1:20 and 2024-01-01 are text. As in YAML 1.1, yes, no, on and off
are switches, and `<<` takes the keys of another mapping over.
"""

import re
from pathlib import Path
from typing import Any, Final

import yaml

from sluice.errors import SettingsError
from sluice.settings.problems import NOT_FILLED_IN, PLACEHOLDER, Lines, Place

VALUES_MAX: Final = 100_000
"""Most values of a file, each repetition by an alias counted: aliases inside each other could make any number."""

_TAG: Final = "tag:yaml.org,2002:"
_NUMBERS: Final = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+",
    "float": r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_REPLACED: Final = {f"{_TAG}{name}" for name in (*_NUMBERS, "timestamp")}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with `_NUMBERS`, and without times."""

    yaml_implicit_resolvers = {  # noqa: RUF012, PyYAML declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _name, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(
        f"{_TAG}{_name}", re.compile(f"^(?:{_pattern})$"), list("-+.0123456789")
    )


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Return the values of a file, and on which lines they are.

    Raises:
        SettingsError: it cannot be read, or is no mapping in YAML; the message says where, and what to do.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read: {error.strerror}; name a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8; save the file as UTF-8") from error
    for number, line in enumerate(text.splitlines(), 1):
        if match := PLACEHOLDER.search(line.partition("#")[0]):
            raise SettingsError(f"{path}: line {number}: {match[0]} {NOT_FILLED_IN}")
    walk = _Walk()
    try:
        loader = _Loader(text)
        top = loader.get_single_node()
        walk.visit(top, ())
        values = {} if top is None else loader.construct_document(top)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"{path}: {where}{error.problem}") from error
    except RecursionError as error:
        raise SettingsError(
            f"{path}: is nested too deeply; use at most a hundred levels"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if values is not None and not isinstance(values, dict):
        raise SettingsError(
            f"{path}: must be a mapping; write sections such as models: and gateway:"
        )
    return values or {}, walk.lines


class _Walk:
    """Goes through the nodes of a file once: makes keys text, finds lines, and refuses what no configuration has.

    Attributes:
        lines: where each value begins; that of a key is the line of the key.
    """

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self._left = VALUES_MAX

    def visit(self, node: yaml.Node | None, place: Place) -> None:
        """Note the values below `node`, of which an alias may have been here before.

        Raises:
            yaml.MarkedYAMLError: a key is no word or stands twice, or there are too many values.
        """
        if isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self._note(value, value, (*place, number))
        elif isinstance(node, yaml.MappingNode):
            merged = [value for key, value in node.value if key.tag == f"{_TAG}merge"]
            keys = [(key, value) for key, value in node.value if key.tag != f"{_TAG}merge"]
            seen = set[str]()
            for key, value in keys:
                if not isinstance(key, yaml.ScalarNode):
                    raise _refused(
                        key, "keys are words; put text that begins with { or [ in quotes"
                    )
                if key.value in seen:
                    raise _refused(key, f"{key.value} is there twice; keep one of them")
                seen.add(key.value)
                key.tag = f"{_TAG}str"
                self._note(key, value, (*place, key.value))
            # Own keys come first and `_note` keeps the first line, because own keys win over merged ones.
            for value in merged:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    self.visit(source, place)

    def _note(self, start: yaml.Node, value: yaml.Node, place: Place) -> None:
        self._left -= 1
        if self._left < 0:
            raise _refused(start, f"more than {VALUES_MAX} values with aliases; write fewer")
        self.lines.setdefault(place, start.start_mark.line + 1)
        self.visit(value, place)


def _refused(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
