"""The checks of commit subjects and of private members, and the figures of scripts/size."""

import ast
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    spec = spec_from_loader(name, SourceFileLoader(name, str(SCRIPTS / name)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("subject", "word"),
    [
        ("gateway: drop the second admission", None),
        ("jobs/store: fence appends by epoch", None),
        ("gateway: dropped the second admission", "imperative"),
        ("docs: the page of figures", "imperative"),
        ("kitchen: add a table", "area"),
        ("docs: Add a table", "lower case"),
        ("What a step's tokens may wait", "area: imperative"),
        (f"docs: add {'a' * 70}", "72"),
    ],
)
def test_commit_subjects(subject: str, word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = script("commit_subjects").problem(subject)
    assert problem is None if word is None else word in problem


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import socket\nsocket.socketpair = print", "assigns to socket.socketpair"),
        ("import sys\nsys.modules['aiohttp'] = None", "assigns to sys.modules"),
        ("from cmd import Cmd\nclass A(Cmd):\n  def run(self): self._x = 1", None),
        (
            "import argparse\nclass A(argparse.HelpFormatter):\n  def _fill_text(self): pass",
            "overrides _fill_text of argparse.HelpFormatter",
        ),
        (
            "from argparse import HelpFormatter as H\nclass A(H):\n  def a(self): self._width",
            "uses _width of argparse.HelpFormatter",
        ),
        ("from sluice.tls import Context\nclass A(Context):\n  def _a(self): pass", None),
    ],
)
def test_private_parts_of_libraries(
    source: str, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = script("public_interfaces").findings(ast.parse(source))
    assert [found.partition(", ")[0] for _, found in findings] == ([text] if text else [])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in {
        "gateway/a.py": (
            'class A:\n    def a(self):\n        """Return it."""\n        return 1  # first\n\n'
            '    def b(self):\n        """What it is."""\n'
        ),
        "gateway/b.py": "class A(Section):\n    key: int = 1\n    _own: int = 2\n",
        "tests/test_a.py": (
            "def test_private(a, monkeypatch):\n    monkeypatch.setattr(a, 'TIME_S', a._b)\n"
            "def test_public(): pass\n"
        ),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (("init", "--quiet"), ("add", "--all")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def test_size_counts_lines_and_form(checkout: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "size"), str(checkout), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    figures = json.loads(done.stdout)
    assert figures["product"]["lines"] == 7
    assert figures["form"] == {
        "imperative": 0.5,
        "comments": 0.1429,
        "repeated_classes": 1,
        "settings": 1,
        "private_tests": 0.5,
        "patched_constants": 1,
        "long_test_names": 0,
    }


def test_size_compares_checkouts(checkout: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "size"), str(checkout), "--against", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    line = next(line for line in done.stdout.splitlines() if "imperative" in line)
    assert line.split() == ["form", "imperative", "0.5", "0.5", "1.0000"]
