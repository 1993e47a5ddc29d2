"""Documents name only pages, files, commands, options, settings and RPCs that exist; so does the code of pages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import pytest
import yaml
from pydantic import BaseModel, ValidationError
from typer.main import get_command

from cli.main import build
from gateway.safety.settings import PolicySettings
from sluice.settings import Settings
from tests.repository.test_layout import ROOT, tracked_files

DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples/README.md"]
    if path.name != "CHANGELOG.md" and "decisions" not in path.parts
)
"""Changelog and decisions name what was removed."""
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
PAGE = re.compile(r"docs/[\w/.-]+\.md")
SERVICE = re.compile(
    r"(?:sluice\.v1\.)?(?:Admin|Inference|Job|Safety)Service(?P<names>[^;\n.]*(?:\.\w+|`, `\w+)*)"
)
RPC = re.compile(r"(?:Service[./]|`)([A-Z][a-z]+(?:[A-Z][a-z]+)*)(?![\w.])")
COMMAND = re.compile(
    r"`(sluice [^`]+)`|^(?:    |\$ )?(?:\.venv/bin/)?(sluice .*(?:\\\n.*)*)", re.MULTILINE
)
OPTION = re.compile(r"(?<=[\s\[])--?[a-zA-Z][a-z-]*")
KEY = re.compile(rf"`((?:{'|'.join(Settings.model_fields)})\.[a-z_*]+(?:\.[a-z_*]+)*)(?:: [^`]*)?`")
VARIABLE = re.compile(r"SLUICE_([A-Z_]*__[A-Z_]+)")
YAML = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(params=NAMES)
def page(request: pytest.FixtureRequest) -> str:
    """The text of each document."""
    path: str = request.param
    return (ROOT / path).read_text(encoding="utf-8")


def test_pages_that_code_names_exist() -> None:
    code = [path for path in tracked_files() if path.suffix in (".py", ".proto", ".yaml", ".toml")]
    named = {
        (str(path), name)
        for path in [*code, Path("CHANGELOG.md")]
        for name in PAGE.findall((ROOT / path).read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


@cache
def known_rpcs() -> frozenset[str]:
    protos = (ROOT / "protos/sluice/v1").glob("*.proto")
    return frozenset(
        name for path in protos for name in re.findall(r"^  rpc (\w+)", path.read_text(), re.M)
    )


def test_rpcs_exist(page: str) -> None:
    named = {name for found in SERVICE.finditer(page) for name in RPC.findall(found[0])}
    assert named - known_rpcs() == set()


def commands_of(page: str) -> Iterator[list[str]]:
    """The command lines of `sluice`, without comments; those with alternatives are no command lines."""
    for quoted, line in COMMAND.findall(page):
        text = re.sub(r"\s# .*", "", (quoted or line).replace("\\\n", " "))
        for part in re.split(r"[;|&]+ ?(?=sluice )", text):
            if " | " not in part:
                yield part.split()[1:]


def problem_of(words: Sequence[str]) -> str | None:
    """What is unknown in a command line."""
    command: Any = get_command(build())
    for word in words:
        if not isinstance(command, click.Group) and not hasattr(command, "get_command"):
            break
        if not re.fullmatch(r"[a-z-]+", word):
            return None  # names no command, such as `sluice COMMAND`
        command = command.get_command(click.Context(command), word)
        if command is None:
            return word
    if words[0] == "bench":  # gives its options to the benchmark
        return None
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    options = OPTION.findall(" " + " ".join(words))
    return next((one for one in options if one not in {*known, "--help"}), None)


def test_commands_and_options_exist(page: str) -> None:
    unknown = [
        (words, found) for words in commands_of(page) if words and (found := problem_of(words))
    ]
    assert unknown == []


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) in (dict, Mapping) or any(map(is_mapping, get_args(annotation)))


def is_key(section: type[BaseModel], parts: Sequence[str]) -> bool:
    """Whether a dotted key leads to a setting; a part of it may be a name of the operator's choice."""
    field = section.model_fields.get(parts[0])
    if field is None or len(parts) == 1:
        return field is not None
    inner = sections_in(field.annotation)
    if is_mapping(field.annotation):
        return not inner or any(
            is_key(one, rest) for one in inner for rest in (parts[1:], parts[2:]) if rest
        )
    return any(is_key(one, parts[1:]) for one in inner)


def test_settings_exist(page: str) -> None:
    keys = [key.rstrip(".*").split(".") for key in KEY.findall(page)]
    keys += [name.lower().split("__") for name in VARIABLE.findall(page)]
    unknown = [
        ".".join(key)
        for key in keys
        if not (is_key(Settings, key) or is_key(PolicySettings, key) or is_module(key))
    ]
    assert unknown == []


def is_module(parts: Sequence[str]) -> bool:
    """Whether a dotted name is one of Python's or of a file, such as nats.conf."""
    if parts[-1] == "conf":
        return True
    try:
        import_module(".".join(parts))
    except ImportError:
        return False
    return True


def unknown_keys(file: Mapping[str, Any]) -> list[str]:
    """The keys of a part of a configuration file that are no settings."""
    try:
        Settings.model_validate(file)
    except ValidationError as error:
        unknown = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        return [".".join(map(str, place)) for place in unknown]
    return []


def test_configurations_have_known_keys(page: str) -> None:
    blocks = [yaml.safe_load(text) for text in YAML.findall(page)]
    whole = [
        block
        for block in blocks
        if isinstance(block, dict) and set(block) & set(Settings.model_fields)
    ]
    assert [key for block in whole for key in unknown_keys(block)] == []
