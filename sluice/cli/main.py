"""The `sluice` command: finds the command, runs it, and turns every error into one line and an exit code.

A command is a function with Typer's annotations in a module of this package. Its module is imported when the command is
called or when help lists it, never before: `sluice generate` must not pay for what `sluice worker` needs. So a module
here imports only light things at its top, and what is heavy inside its function.

Exit codes: 0 when what was asked happened, 1 when it did not, 2 when the command line was wrong, 130 after Ctrl-C.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from sluice import __version__
from sluice.cli import failure

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "up": ("sluice.cli.up", "up"),
    "down": ("sluice.cli.down", "down"),
    "reload": ("sluice.cli.reload", "reload"),
    "status": ("sluice.cli.status", "status"),
    "demo": ("sluice.cli.demo", "demo"),
    "generate": ("sluice.cli.generate", "generate"),
    "chat": ("sluice.cli.chat", "chat"),
    "models": ("sluice.cli.models", "models"),
    "explain": ("sluice.cli.explain", "explain"),
    "feedback": ("sluice.cli.explain", "feedback"),
    "safety": ("sluice.cli.safety", "safety"),
    "drift": ("sluice.cli.drift", "drift"),
    "record": ("sluice.cli.record", "record"),
    "simulate": ("sluice.cli.simulate", "simulate"),
    "plan": ("sluice.cli.plan", "plan"),
    "router": ("sluice.cli.router", "router"),
    "eval": ("sluice.cli.evaluate", "evaluate"),
    "bench": ("sluice.cli.bench", "bench"),
    "gateway": ("sluice.cli.gateway", "gateway"),
    "batcher": ("sluice.cli.batcher", "batcher"),
    "worker": ("sluice.cli.worker", "worker"),
}
"""Module and function of each command, in the order help lists them."""

INTERRUPTED: Final = 130
"""What Typer makes of Ctrl-C."""

_HELP: Final = {"help_option_names": ["-h", "--help"]}


class LazyCommands(TyperGroup):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command called `cmd_name`, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name]
        single = typer.Typer(
            add_completion=False, rich_markup_mode=_markup(), context_settings=_HELP
        )
        single.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(single)


def build() -> typer.Typer:
    """The application, without any command's code."""
    app = typer.Typer(
        cls=LazyCommands,
        name="sluice",
        add_completion=False,
        rich_markup_mode=_markup(),
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_about)
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; writes errors to stderr, never a traceback."""
    words = list(arguments) or ["--help"]
    as_json = "--json" in words
    command = typer.main.get_command(build())
    try:
        code = command.main(args=words, prog_name="sluice", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone (`sluice models | head -1`); nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return failure.report(error, as_json)
    if code == INTERRUPTED:
        failure.report(failure.CommandFailed("CANCELLED", "interrupted"), as_json)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `sluice` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Answers hold any character; a terminal that lacks one shows a replacement.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sluice {__version__}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Sluice: tokens from small and large language models over one gRPC API.

    Start a mesh on this machine with `sluice up`, ask it with `sluice generate "..."`. The gateway's address is
    127.0.0.1:50051, or what --address or SLUICE_ADDRESS say.
    """


def _markup() -> Any:
    """Boxes and colours are for terminals."""
    return "rich" if sys.stdout.isatty() else None
