"""docs/reference/input-bounds.md has a row for every input that a caller or another process reaches, and each row is
true.

A row names its inputs in backquotes, a kind or a message before the colon: `EmbedRequest: texts dimensions`,
`HTTP: top_p`, `NATS: sluice.reports.<batcher>`, `Settings: limits.concurrent`. In messages of sluice.internal.v1, which
no caller sends, `*` stands for all fields.
"""

import ast
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
from google.protobuf.descriptor import Descriptor
from pydantic import BaseModel

import sluice.internal.v1
from sluice import settings
from sluice.openai.bodies import Part
from sluice.settings.limits import LimitSettings, RateLimits, SoftLimit
from sluice.settings.mesh import JobsSettings, TenantSettings
from sluice.v1 import admin_pb2, inference_pb2, jobs_pb2, safety_pb2
from sluice.wire import subjects

ROOT = Path(__file__).parents[2]
PAGE: Final = "docs/reference/input-bounds.md"
HTTP: Final = "HTTP"
NATS: Final = "NATS"
SETTINGS: Final = "Settings"
OTHER: Final = "Other"
"""Inputs that no list has: bytes of files, headers of a connection. A row may name any."""
SERVICES: Final = (inference_pb2, jobs_pb2, admin_pb2, safety_pb2)
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "gateway": settings.GatewaySettings,
    "jobs": JobsSettings,
    "limits": LimitSettings,
    "limits.models.NAME": RateLimits,
    "limits.soft": SoftLimit,
    "tenants.NAME": TenantSettings,
}
"""Those that say how much of something a caller gets."""
NO_INPUTS: Final = frozenset({"path_params"})
"""Keys that the server sets."""


def rows() -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """Of each row: its text, the inputs that it names, the tests that hold it."""
    found, columns = [], 0
    for line in (ROOT / PAGE).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not columns:
            assert cells == ["input", "bound", "what one gets", "test"], line
            columns = len(cells)
        elif set(line) - set("|- "):
            assert len(cells) == columns, f"{PAGE}: a row has {len(cells)} cells: {line}"
            named = [
                (kind, name)
                for kind, names in re.findall(r"`(\w+): ([^`]+)`", cells[0])
                for name in names.split()
            ]
            found.append((line, named, re.findall(r"`(tests/[^`]+)`", cells[3])))
    return found


ROWS: Final = rows()
NAMED: Final = Counter(one for _, named, _ in ROWS for one in named)


def messages_of_callers() -> dict[str, Descriptor]:
    """The messages that callers send, those inside of them too."""
    found: dict[str, Descriptor] = {}

    def add(message: Descriptor) -> None:
        ours = message.full_name.startswith("sluice.v1.") and not message.GetOptions().map_entry
        if ours and message.name not in found:
            found[message.name] = message
            for field in message.fields:
                if field.message_type is not None:
                    add(field.message_type)

    for module in SERVICES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                add(method.input_type)
    return found


def internal_messages() -> dict[str, Descriptor]:
    """What processes send each other, or keep for each other."""
    found: dict[str, Descriptor] = {}
    for module in pkgutil.iter_modules(sluice.internal.v1.__path__):
        if module.name.endswith("_pb2"):
            loaded = importlib.import_module(f"sluice.internal.v1.{module.name}")
            found |= loaded.DESCRIPTOR.message_types_by_name
    return found


def http_names() -> set[str]:
    """Names that the code takes out of bodies, forms, queries and headers."""
    files = [
        *sorted((ROOT / "gateway/http").glob("*.py")),
        *(ROOT / "sluice/openai" / f"{name}.py" for name in ("requests", "embeddings")),
    ]
    names = {name for path in files for name in _names_in(ast.parse(path.read_text()))}
    for path in (ROOT / "gateway/http").glob("*.py"):  # their classes declare fields
        import_module(f"gateway.http.{path.stem}")
    names |= {one.name for one in inference_pb2.SamplingParams.DESCRIPTOR.fields}
    return (names | set(_declared(Part))) - NO_INPUTS


def _declared(part: type[Part]) -> Iterator[str]:
    """The fields of bodies, and of their parts."""
    for below in part.__subclasses__():
        yield from (field.alias or name for name, field in below.model_fields.items())
        yield from _declared(below)


def _names_in(tree: ast.AST) -> Iterator[str]:
    """Keys of tables of fields, and what is looked up by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("pop", "get") and node.args:
                yield from _texts(node.args[0])
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id in _TABLES:
                value = node.value
                yield from (
                    [text for key in value.keys if key is not None for text in _texts(key)]
                    if isinstance(value, ast.Dict)
                    else _texts(value)
                )


_TABLES: Final = {
    *("_NO_EFFECT", "_EMBED_FIELDS", "_RERANK_FIELDS", "_FIELDS", "_INPUTS", "_CLIENT_TIMEOUTS"),
    *("PRIORITY", "TIMEOUT", "IDEMPOTENCY_KEY", "_UNUSED", "API_KEY", "VERSION"),
}
"""Constants that name fields or headers."""


def _texts(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            text = inner.value
            if re.fullmatch(r"[a-z][a-z0-9_-]*", text):
                yield text


def nats_subjects() -> set[str]:
    """What the docstring of sluice/wire/subjects.py lists."""
    listed = re.findall(r"^\| `(\S[^`]*)` \|", subjects.__doc__ or "", re.MULTILINE)
    assert len(listed) > 30
    return {one.replace(" ", "_") for one in listed}


def named(kind: str) -> set[str]:
    return {name for of, name in NAMED if of == kind}


@pytest.mark.parametrize("message", messages_of_callers().values(), ids=lambda one: one.name)
def test_every_field_that_a_caller_sends_has_a_row(message: Descriptor) -> None:
    known = {field.name for field in message.fields}
    missing, strange = known - named(message.name), named(message.name) - known
    assert not missing, (
        f"{PAGE} has no row for {message.name}: {' '.join(sorted(missing))}. Give each field a bound that is checked "
        f"(a typed error names the field), a test of it, and write `{message.name}: FIELD` into the first cell of the "
        "row that has the same bound, or add a row: input, bound, what one gets, `tests/FILE.py::FUNCTION`."
    )
    assert not strange, f"{PAGE}: {message.name} has no field {' '.join(sorted(strange))}"


@pytest.mark.parametrize("message", internal_messages().values(), ids=lambda one: one.name)
def test_every_message_between_processes_has_a_row(message: Descriptor) -> None:
    if "*" not in named(message.name):
        test_every_field_that_a_caller_sends_has_a_row(message)


def test_every_field_of_http_has_a_row() -> None:
    missing = http_names() - named(HTTP)
    assert not missing, (
        f"{PAGE} has no row for the HTTP fields {' '.join(sorted(missing))}: write `HTTP: NAME` into the row of the "
        "field of the proto that it becomes, or into that of fields without an effect"
    )
    source = "\n".join(
        path.read_text()
        for folder in ("gateway", "sluice")
        for path in (ROOT / folder).rglob("*.py")
    )
    words = set(re.findall(r"[\w-]+", source))
    strange = named(HTTP) - words
    assert not strange, f"{PAGE}: no code knows the HTTP fields {strange}"


def test_every_subject_of_nats_has_a_row() -> None:
    missing, strange = nats_subjects() - named(NATS), named(NATS) - nats_subjects()
    assert not missing, f"{PAGE} has no row for `NATS: {' '.join(sorted(missing))}`"
    assert not strange, f"{PAGE}: sluice/wire/subjects.py does not list {strange}"


def test_every_setting_that_bounds_callers_has_a_row() -> None:
    known = {
        f"{path}.{name}" for path, section in SECTIONS.items() for name in section.model_fields
    }
    missing, strange = known - named(SETTINGS), named(SETTINGS) - known
    assert not missing, (
        f"{PAGE} has no row for `Settings: {' '.join(sorted(missing))}`: write it into the row of what it bounds, or "
        "into one that says that it bounds no input"
    )
    assert not strange, f"{PAGE}: there are no settings {sorted(strange)}"


def test_rows_name_what_is_there() -> None:
    known = {HTTP, NATS, SETTINGS, OTHER, *messages_of_callers(), *internal_messages()}
    assert {kind for kind, _ in NAMED} <= known, {kind for kind, _ in NAMED} - known
    twice = [
        f"{kind}: {name}" for (kind, name), count in NAMED.items() if count > 1 and kind != OTHER
    ]
    assert not twice, f"{PAGE} has two rows for {twice}"


@pytest.mark.parametrize(("row", "tests"), [(row, tests) for row, _, tests in ROWS])
def test_the_tests_of_a_row_are_there(row: str, tests: list[str]) -> None:
    assert tests, f"{PAGE}: a row names no test: {row}"
    for one in tests:
        path, _, function = one.partition("::")
        assert function, f"{PAGE}: {one} names no function"
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(async )?def {function}\(", source, re.MULTILINE), one
