"""Figures of how readable a checkout is; `scripts/size` prints them.

Product code is every tracked Python file outside tests/ and bench/ that is not generated. Test code is everything below
tests/. The figures:

- `imperative`: share of function docstrings whose first word is a verb of verbs.txt. Properties do not count.
- `comments`: share of code lines with a comment. Directives such as `noqa` do not count.
- `repeated_classes`: class names that two product files define.
- `settings`: keys of the configuration, one for each field that a settings class declares.
- `private_tests`: share of test functions that access a private member of another object.
- `patched_constants`: calls of `monkeypatch.setattr` that replace a name in upper case.
- `long_test_names`: test functions with a name of more than 60 characters.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path
from typing import Final

NAME_CHARS: Final = 60
"""Longest name of a test function."""
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_VERBS: Final = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
_SETTINGS_BASES: Final = frozenset({"Section", "_Section", "BaseSettings"})
_DIRECTIVE: Final = re.compile(r"#(!| ?(noqa|type:|fmt:|pragma|ruff:|mypy:|isort:))")
_CONSTANT: Final = re.compile(r"(^|\.)_?[A-Z][A-Z0-9_]*$")


def is_verb(word: str) -> bool:
    """Return whether `word` is an English verb in the imperative."""
    return word.lower() in _VERBS


class CodeForm:
    """Collects the figures, file by file."""

    def __init__(self) -> None:
        self._docstrings = self._imperative = self._lines = self._comments = 0
        self._tests = self._private = self._patched = self._long_names = 0
        self._classes: Counter[str] = Counter()
        self._bases: dict[str, list[str]] = {}
        self._fields: dict[str, int] = {}

    def add_product(self, source: str, lines: int) -> None:
        """Count a file of product code that has `lines` lines of code."""
        module = ast.parse(source)
        self._lines += lines
        self._comments += _comments(source)
        self._classes.update({node.name for node in module.body if isinstance(node, ast.ClassDef)})
        for node in ast.walk(module):
            if isinstance(node, FUNCTIONS) and not _is_property(node):
                docstring = ast.get_docstring(node)
                self._docstrings += docstring is not None
                self._imperative += docstring is not None and is_verb(_first_word(docstring))
            elif isinstance(node, ast.ClassDef):
                self._bases[node.name] = [_last_name(base) for base in node.bases]
                self._fields[node.name] = sum(map(_is_field, node.body))

    def add_test(self, source: str) -> None:
        """Count a file of test code."""
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, FUNCTIONS) and node.name.startswith("test_"):
                self._tests += 1
                self._long_names += len(node.name) > NAME_CHARS
                self._private += any(map(_is_private_access, ast.walk(node)))
            self._patched += _patches_constant(node)

    def figures(self) -> dict[str, float]:
        """Return the figures of the files so far."""
        return {
            "imperative": _share(self._imperative, self._docstrings),
            "comments": _share(self._comments, self._lines),
            "repeated_classes": sum(count > 1 for count in self._classes.values()),
            "settings": sum(self._fields[name] for name in self._fields if self._is_settings(name)),
            "private_tests": _share(self._private, self._tests),
            "patched_constants": self._patched,
            "long_test_names": self._long_names,
        }

    def _is_settings(self, name: str, below: frozenset[str] = frozenset()) -> bool:
        if name in _SETTINGS_BASES:
            return True
        bases = [base for base in self._bases.get(name, ()) if base not in below]
        return any(self._is_settings(base, below | {name}) for base in bases)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _first_word(docstring: str) -> str:
    match = re.match(r"[A-Za-z]+(?![\w'-])", docstring)
    return match[0] if match else ""


def _comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string) for token in tokens
    )


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_last_name(decorator).endswith("property") for decorator in node.decorator_list)


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_field(node: ast.stmt) -> bool:
    """Return whether a statement of a class declares a field of pydantic."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
        return False
    names = {_last_name(part) for part in ast.walk(node.annotation) if isinstance(part, ast.expr)}
    return not node.target.id.startswith("_") and not names & {"ClassVar", "Final"}


def _is_private_access(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not re.match(r"_[^_]", node.attr):
        return False
    return _last_name(node.value) not in ("self", "cls")


def _patches_constant(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or _last_name(node.func) != "setattr":
        return False
    names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
    return any(isinstance(name, str) and _CONSTANT.search(name) for name in names)
