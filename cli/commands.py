"""How commands are declared: their options, parameters that stand for several options, and `--json`."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Annotated, Any, Final, get_args

import typer
from typer.core import TyperGroup

Command = Callable[..., None]

HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Context settings of every command. Help is plain text, the same on a terminal and in a pipe."""
_ANNOTATED: Final[Any] = Annotated  # of types that are known when the command is called
_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


def option(default: Any, about: str, *names: str, **settings: Any) -> Any:
    """Return the default of a parameter, or of a field of a dataclass, that is an option.

    A switch that is off by default has no ``--no-`` form. Without ``names`` it has that of the parameter; other
    settings are Typer's.
    """
    return field(
        default=default, metadata={"is": typer.Option, "names": names, "help": about, **settings}
    )


def argument(default: Any, about: str, **settings: Any) -> Any:
    """Return the default of a parameter that is an argument; ``...`` stands for a required one."""
    return field(
        default=default, metadata={"is": typer.Argument, "names": (), "help": about, **settings}
    )


_JSON: Final = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=bool,
    default=option(False, "Print JSON for programs instead of text for people.", "--json"),
)


def wants_json() -> bool:
    """Return whether the running command was given `--json`."""
    return _as_json.get()


@dataclass(frozen=True, slots=True)
class Group:
    """In an annotation: the options are the parameters of ``make``, and the parameter gets what it returns.

    A context manager is entered, and left when the command ends. Options ``without`` keep their defaults and are not
    offered. A dataclass needs no group: its fields are options.
    """

    make: Callable[..., Any]
    without: tuple[str, ...] = ()

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Return the options of the group."""
        for one in _parameters(self.make):
            if one.name not in self.without:
                yield one

    def made(self, given: dict[str, Any]) -> Any:
        """Take the options of the group out of ``given`` and return what ``make`` makes of them."""
        kept = {one.name: one.default for one in _parameters(self.make) if one.name in self.without}
        return self.make(**kept, **{one.name: given.pop(one.name) for one in self.parameters()})


def expanded(command: Command, *, with_json: bool = True) -> Command:
    """Return `command` as Typer accepts it: option groups expanded, `--json` appended.

    ``with_json`` False: it has no such option.
    """
    own = list(_parameters(command))
    groups = {one.name: group for one in own if (group := _group(one.annotation))}
    parameters = [
        one
        for mine in own
        for one in (groups[mine.name].parameters() if mine.name in groups else (mine,))
    ]
    if with_json:
        parameters.append(_typed(_JSON))

    @wraps(command)
    def run(**given: Any) -> None:
        with ExitStack() as opened:
            asked = _as_json.set(with_json and given.pop(_JSON.name))
            opened.callback(_as_json.reset, asked)
            for name, group in groups.items():
                made = group.made(given)
                managed = isinstance(made, AbstractContextManager)
                given[name] = opened.enter_context(made) if managed else made
            command(**given)

    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


class CommandGroup(TyperGroup):
    """Explain what is missing or mistyped where one of several commands is expected."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Print the help where no command is named."""
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help(), file=sys.stderr)
            ctx.fail("name one of the commands")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Suggest the commands that look like a mistyped one."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            close = " or ".join(get_close_matches(args[0], known))
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {close}?" if close else ""))
        return super().resolve_command(ctx, args)


class Commands(typer.Typer):
    """A command with commands of its own."""

    def __init__(self, about: str) -> None:
        super().__init__(
            cls=CommandGroup,
            help=about,
            add_completion=False,
            rich_markup_mode=None,
            context_settings=HELP,
        )

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """Register a command, as `Typer.command` does."""
        register = super().command(*args, **kwargs)

        def add(function: Command) -> Command:
            register(expanded(function))
            return function

        return add


def _parameters(make: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Return the parameters of a function or a dataclass with the annotations that Typer reads."""
    declared = {one.name: one for one in fields(make)} if is_dataclass(make) else {}
    for name, one in inspect.signature(make).parameters.items():
        yield _typed(one.replace(default=declared.get(name, one.default)))


def _typed(one: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter as Typer takes it, by keyword only."""
    declared, annotation, default = one.default, one.annotation, one.default
    if isinstance(declared, Field):
        default = (
            inspect.Parameter.empty if declared.default in (..., MISSING) else declared.default
        )
        settings = dict(declared.metadata)
        if settings:
            kind, names = settings.pop("is"), settings.pop("names")
            if default is False and not names:
                names = (f"--{one.name.replace('_', '-')}",)
            annotation = _ANNOTATED[annotation, kind(*names, **settings)]
    return one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _group(annotation: Any) -> Group | None:
    """Return the group of a parameter, or None for a plain option."""
    if is_dataclass(annotation) and isinstance(annotation, type):
        return Group(annotation)
    return next((one for one in get_args(annotation) if isinstance(one, Group)), None)
