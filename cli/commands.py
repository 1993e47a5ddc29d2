"""How commands are declared: a parameter that stands for several options, which commands then share; and `--json`."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from functools import wraps
from typing import Annotated, Any, Final, get_args

import typer
from typer import Option
from typer.models import OptionInfo

Command = Callable[..., None]

HELP: Final = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command."""
_JSON: Final = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, Option("--json", help="Print JSON for programs instead of text for people.")
    ],
)
_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


def option(about: str, *names: str, **settings: Any) -> Any:
    """How an option is declared: what it is for, its names where they are not its parameter's, and Typer's settings.

    A switch that is off by default has no ``--no-`` form.
    """
    return typer.Option(*names, help=about, **settings)


def argument(about: str, **settings: Any) -> Any:
    """The same of an argument."""
    return typer.Argument(help=about, **settings)


def wants_json() -> bool:
    """Whether the command that runs was given ``--json``."""
    return _as_json.get()


@dataclass(frozen=True, slots=True)
class Group:
    """In an annotation: the options are the parameters of ``make``, and the parameter gets what it returns.

    A context manager is entered, and left when the command ends. Options ``without`` keep their defaults and are not
    offered. A dataclass needs no group: its fields are options.
    """

    make: Callable[..., Any]
    without: tuple[str, ...] = ()

    @property
    def offered(self) -> dict[str, inspect.Parameter]:
        """The options by name."""
        parameters = inspect.signature(self.make).parameters
        return {name: one for name, one in parameters.items() if name not in self.without}


def expanded(command: Command, *, with_json: bool = True) -> Command:
    """``command`` as Typer takes it: each group replaced by its options, and ``--json`` behind them.

    ``with_json`` False: it has no such option.
    """
    own = inspect.signature(command).parameters
    groups = {name: group for name, one in own.items() if (group := _group(one.annotation))}
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, mine in own.items()
        for one in (groups[name].offered.values() if name in groups else (mine,))
    ]
    if with_json:
        parameters.append(_JSON)
    for one in parameters:
        for declared in get_args(one.annotation):
            # Typer takes the first name for a default, until it reads the annotation.
            unnamed = isinstance(declared, OptionInfo) and declared.default is ...
            if one.default is False and unnamed:
                declared.param_decls = (f"--{one.name.replace('_', '-')}",)

    @wraps(command)
    def run(**given: Any) -> None:
        with ExitStack() as opened:
            asked = _as_json.set(with_json and given.pop(_JSON.name))
            opened.callback(_as_json.reset, asked)
            for name, group in groups.items():
                made = group.make(**{option: given.pop(option) for option in group.offered})
                managed = isinstance(made, AbstractContextManager)
                given[name] = opened.enter_context(made) if managed else made
            command(**given)

    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


class Commands(typer.Typer):
    """A command with commands of its own."""

    def __init__(self, about: str) -> None:
        super().__init__(
            help=about, add_completion=False, no_args_is_help=True, context_settings=HELP
        )

    def command(self, *args: Any, with_json: bool = True, **kwargs: Any) -> Callable[[Any], Any]:
        """As Typer's; ``with_json`` as of `expanded`."""
        register = super().command(*args, **kwargs)

        def add(function: Command) -> Command:
            register(expanded(function, with_json=with_json))
            return function

        return add


def _group(annotation: Any) -> Group | None:
    """The group of a parameter; None: it is an option."""
    if is_dataclass(annotation) and isinstance(annotation, type):
        return Group(annotation)
    return next((one for one in get_args(annotation) if isinstance(one, Group)), None)
