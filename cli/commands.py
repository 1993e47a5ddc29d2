"""What all commands share: `--json`, and parameters that stand for several options."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from functools import wraps
from typing import Annotated, Any, Final, get_args

import typer
from typer.core import TyperGroup

Command = Callable[..., None]

HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Context settings of every command. Help is plain text, the same on a terminal and in a pipe."""
_JSON: Final = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
    ],
)
_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


def wants_json() -> bool:
    """Return whether the running command was given `--json`."""
    return _as_json.get()


@dataclass(frozen=True, slots=True)
class Group:
    """In an annotation: the options are the parameters of `make`, and the parameter gets what it returns.

    A context manager is entered, and left when the command ends. Options `without` keep their
    defaults and are not offered. A dataclass needs no group: its fields are options.
    """

    make: Callable[..., Any]
    without: tuple[str, ...] = ()

    @property
    def options(self) -> list[inspect.Parameter]:
        """The options of the group."""
        return [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for option in inspect.signature(self.make).parameters.values()
            if option.name not in self.without
        ]


def expanded(command: Command, *, with_json: bool = True) -> Command:
    """Return `command` as Typer accepts it: with the options of its groups, and `--json`."""
    options: list[inspect.Parameter] = []
    groups: dict[str, Group] = {}
    for parameter in inspect.signature(command).parameters.values():
        annotation = parameter.annotation
        group = next((part for part in get_args(annotation) if isinstance(part, Group)), None)
        if is_dataclass(annotation):
            group = Group(annotation)  # type: ignore[arg-type]  # the class
        if group is None:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = group
            options += group.options
    options += [_JSON] if with_json else []

    @wraps(command)
    def run(**values: Any) -> None:
        with ExitStack() as stack:
            stack.callback(_as_json.reset, _as_json.set(values.pop(_JSON.name, False)))
            for name, group in groups.items():
                made = group.make(
                    **{option.name: values.pop(option.name) for option in group.options}
                )
                is_manager = isinstance(made, AbstractContextManager)
                values[name] = stack.enter_context(made) if is_manager else made
            command(**values)

    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


class CommandGroup(TyperGroup):
    """Explain what is missing where one of several commands is expected."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Print the help where no command is named."""
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help(), file=sys.stderr)
            ctx.fail("name one of the commands")
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """A command with commands of its own."""

    def __init__(self, about: str) -> None:
        super().__init__(
            cls=CommandGroup,
            # Without one Typer makes the only command of a group the group itself.
            callback=lambda: None,
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
