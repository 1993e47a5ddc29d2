"""Option groups: a parameter of a command that stands for several options, which commands then share."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, is_dataclass
from typing import Any, get_args

import typer

Command = Callable[..., None]


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


def expanded(command: Command) -> Command:
    """``command`` as Typer takes it: each group replaced by its options."""
    own = inspect.signature(command).parameters
    groups = {name: group for name, one in own.items() if (group := _group(one.annotation))}
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, mine in own.items()
        for one in (groups[name].offered.values() if name in groups else (mine,))
    ]

    def run(**given: Any) -> None:
        with ExitStack() as opened:
            for name, group in groups.items():
                made = group.make(**{option: given.pop(option) for option in group.offered})
                managed = isinstance(made, AbstractContextManager)
                given[name] = opened.enter_context(made) if managed else made
            command(**given)

    run.__name__, run.__doc__, run.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


class Commands(typer.Typer):
    """A command with commands of its own, which may take option groups."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """As Typer's."""
        register = super().command(*args, **kwargs)

        def add(function: Command) -> Command:
            register(expanded(function))
            return function

        return add


def _group(annotation: Any) -> Group | None:
    """The group of a parameter; None: it is an option."""
    if is_dataclass(annotation) and isinstance(annotation, type):
        return Group(annotation)
    return next((one for one in get_args(annotation) if isinstance(one, Group)), None)
