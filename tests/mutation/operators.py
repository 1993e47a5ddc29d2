"""What is changed in a program to see whether a test notices: each change is one mutant.

- comparison: ``<`` to ``<=`` and ``>=``, ``<=`` to ``<`` and ``>``, and so on; ``==`` to ``!=``, ``is`` to ``is not``,
  ``in`` to ``not in``, and back.
- boolean: ``and`` to ``or`` and back; ``not x`` to ``x``; ``True`` to ``False`` and back; a condition that is no
  comparison is negated.
- constant: a number is one more.
- statement: a call, an assignment to an attribute or an item, ``+=`` and the like, ``del``, ``continue``, ``break`` or
  ``assert`` is taken out.
- return: ``return x`` to ``return None``.
- raise: it is taken out.

Not changed: strings; what is raised or logged; annotations and decorators; assignments to names, without which nothing
runs; assertions that only narrow a type (``x is not None``, ``isinstance``).
"""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOGS: Final = frozenset({"_log", "log", "logger", "logging"})
_DECIDED: Final = (ast.Compare, ast.BoolOp, ast.Constant)
"""Conditions that other operators change already; `not` as well."""
Edit = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: relative to the root of the repository.
        where: the function or class that it is in, with those around it; empty: the module.
        operator: of the table above.
        was: the code that is changed.
        becomes: what it becomes; empty: nothing.
        number: among equal changes of one function, from 0.
        lines: first and last line of what is changed.
        at: which of the changes of its file, from 0.
        function: qualified name and first line of the outermost function, decorators included; None: it is outside of
            functions, so it happens when the module is imported.
        used: if it is: lines of functions that use what is changed; none: it is not known.
    """

    file: str
    where: str
    operator: str
    was: str
    becomes: str
    number: int
    lines: tuple[int, int]
    at: int
    function: tuple[str, int] | None
    used: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Names it wherever its line moves."""
        return self.file, self.where, self.was, self.becomes, self.number

    def __str__(self) -> str:
        place = f"{self.file}:{self.lines[0]} {self.where}".rstrip()
        return f"{place}: {self.was!r} -> {self.becomes!r}"


@dataclass
class _Change:
    node: ast.AST
    where: str
    operator: str
    was: str
    becomes: str
    edit: Edit
    function: tuple[str, int] | None
    defines: str | range


def mutants_of(file: str, source: str, names: Collection[str] = ()) -> list[Mutant]:
    """All mutants of ``source``, in the order of the file; ``names``: of these functions and classes alone."""
    seen, found, tree = Counter[tuple[str, str, str]](), [], ast.parse(source)
    for at, change in enumerate(_changes(tree)):
        if names and not any(f"{change.where}.".startswith(f"{name}.") for name in names):
            continue
        key = (change.where, change.was, change.becomes)
        node = change.node
        lines = (node.lineno, node.end_lineno or node.lineno)  # type: ignore[attr-defined]
        used = _used(tree, change)
        found.append(Mutant(file, *_texts(change), seen[key], lines, at, change.function, used))
        seen[key] += 1
    return found


def _used(tree: ast.Module, change: _Change) -> tuple[int, ...]:
    if isinstance(change.defines, range):
        return tuple(change.defines)
    return tuple(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and node.id == change.defines
        and isinstance(node.ctx, ast.Load)
    )


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The program of ``source`` with the change of ``mutant``, its lines where they were."""
    tree = ast.parse(source)
    for at, change in enumerate(_changes(tree)):
        if at == mutant.at:
            change.edit()
            break
    return ast.fix_missing_locations(tree)


def _texts(change: _Change) -> tuple[str, str, str, str]:
    return change.where, change.operator, change.was, change.becomes


def _changes(tree: ast.Module) -> Iterator[_Change]:
    yield from _Finder().body(tree, "body")


@dataclass
class _Finder:
    """Walks a tree in the order of the file. An edit is made after the walk has passed, or it would see it."""

    names: list[str] = field(default_factory=list)
    function: tuple[str, int] | None = None
    defines: str | range = ""
    """The name that a statement of the module gives a value, or the lines of a function whose defaults they are."""

    def body(self, parent: ast.AST, name: str) -> Iterator[_Change]:
        """Of a list of statements."""
        statements = getattr(parent, name)
        for at, statement in enumerate(statements):
            if _is_docstring(statement) or _is_log(statement) or _is_for_types(statement):
                continue
            if not self.names:
                self.defines = _defined(statement)
            if (operator := _taken_out(statement)) is not None:
                yield self._change(statement, operator, "", _setter(statements, at, ast.Pass()))
            if isinstance(statement, ast.Raise):
                continue
            if isinstance(statement, ast.Return) and not _is_none(statement.value):
                yield self._change(
                    statement,
                    "return",
                    "return None",
                    lambda one=statement: setattr(one, "value", ast.Constant(None)),
                )
            yield from self.node(statement)

    def node(self, node: ast.AST) -> Iterator[_Change]:
        """Of everything in ``node``."""
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from self._definition(node)
            return
        yield from self._own(node)
        for name, value in ast.iter_fields(node):
            if name == "annotation" or isinstance(node, ast.JoinedStr):
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from self.body(node, name)
            else:
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, ast.AST):
                        yield from self.node(one)

    def _definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> Iterator[_Change]:
        self.names.append(node.name)
        outer = self.function
        if isinstance(node, _FUNCTIONS):
            # Defaults are computed where the function is made.
            before, self.defines = self.defines, range(node.body[0].lineno, node.end_lineno or 0)
            yield from self.node(
                ast.Tuple([*node.args.defaults, *filter(None, node.args.kw_defaults)])
            )
            self.defines = before
            if outer is None:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                self.function = (".".join(self.names), first)
        yield from self.body(node, "body")
        self.function = outer
        self.names.pop()

    def _own(self, node: ast.AST) -> Iterator[_Change]:
        if isinstance(node, ast.Compare):
            for at, op in enumerate(node.ops):
                for other in _COMPARISONS[type(op)]:
                    yield self._change(node, "comparison", None, _setter(node.ops, at, other()))
        elif isinstance(node, ast.BoolOp):
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield self._change(node, "boolean", None, lambda: setattr(node, "op", other_op))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            twice = ast.UnaryOp(ast.Not(), node.operand)
            yield self._change(node, "boolean", None, lambda: setattr(node, "operand", twice))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                value: object = not node.value
                yield self._change(node, "boolean", None, lambda: setattr(node, "value", value))
            elif isinstance(node.value, int | float):
                more = node.value + 1
                yield self._change(node, "constant", None, lambda: setattr(node, "value", more))
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and _is_undecided(node.test):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield self._change(node.test, "boolean", None, lambda: setattr(node, "test", negated))
        elif isinstance(node, ast.comprehension):
            for at, test in enumerate(node.ifs):
                if _is_undecided(test):
                    edit = _setter(node.ifs, at, ast.UnaryOp(ast.Not(), test))
                    yield self._change(test, "boolean", None, edit)

    def _change(self, node: ast.AST, operator: str, becomes: str | None, edit: Edit) -> _Change:
        was = ast.unparse(node)
        if becomes is None:
            becomes = _preview(node, operator, edit)
        return _Change(
            node, ".".join(self.names), operator, was, becomes, edit, self.function, self.defines
        )


def _preview(node: ast.AST, operator: str, edit: Edit) -> str:
    """The text after ``edit``, which is undone."""
    if operator == "boolean" and not isinstance(node, ast.BoolOp | ast.Constant | ast.UnaryOp):
        return f"not {ast.unparse(node)}"
    before = {
        name: list(value) if isinstance(value, list) else value
        for name, value in ast.iter_fields(node)
    }
    edit()
    text = ast.unparse(ast.fix_missing_locations(node))
    for name, value in before.items():
        if isinstance(value, list):
            getattr(node, name)[:] = value
        else:
            setattr(node, name, value)
    return text


def _setter(values: list[ast.AST], at: int, value: ast.AST) -> Edit:
    def edit() -> None:
        values[at] = value

    return edit


def _taken_out(statement: ast.stmt) -> str | None:
    """The operator that takes ``statement`` out; None: it stays."""
    if isinstance(statement, ast.Raise):
        return "raise"
    if isinstance(statement, ast.AugAssign | ast.Delete | ast.Continue | ast.Break):
        return "statement"
    if isinstance(statement, ast.Expr):
        return None if isinstance(statement.value, ast.Yield | ast.YieldFrom) else "statement"
    if isinstance(statement, ast.Assert):
        return None if _narrows(statement.test) else "statement"
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        places = [name for one in targets for name in _targets(one)]
        return None if any(isinstance(one, ast.Name) for one in places) else "statement"
    return None


def _defined(statement: ast.stmt) -> str:
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return next((one.id for one in targets if isinstance(one, ast.Name)), "")


def _targets(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _targets(one)
    else:
        yield target


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and _is_none(test.comparators[0])
    return (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id == "isinstance"
    )


def _is_undecided(test: ast.expr) -> bool:
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return not isinstance(test, _DECIDED) and not is_not


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_log(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and isinstance(statement.value.func.value, ast.Name)
        and statement.value.func.value.id in _LOGS
    )


def _is_for_types(statement: ast.stmt) -> bool:
    """Imports and declarations that have no effect, and assertions for the type checker."""
    if isinstance(statement, ast.Assert):
        return _narrows(statement.test)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id == "__slots__"
    return isinstance(statement, ast.Import | ast.ImportFrom) or (
        isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    )
