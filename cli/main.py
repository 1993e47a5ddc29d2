"""The `sluice` command: finds the command, runs it, and turns every error into one line and an exit code.

A command is a function with Typer's annotations in a module of this package. Its module is imported when the command is
called or when help lists it, never before: `sluice generate` must not pay for what `sluice worker` needs. So a module
here imports only light things at its top, and what is heavy inside its function.

Exit codes: 0 when what was asked happened, 1 when it did not, 2 when the command line was wrong, 130 after Ctrl-C.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from typer import Option

from cli import failure
from cli.commands import HELP, CommandGroup, expanded
from sluice import __version__
from sluice.proxies import bypass_loopback

COMMANDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "up": ("mesh", "up", "mesh"),
    "down": ("mesh", "down", "mesh"),
    "reload": ("mesh", "reload", "mesh"),
    "status": ("mesh", "status", "mesh"),
    "config": ("config", "config", "mesh"),
    "certs": ("certs", "certs", "mesh"),
    "demo": ("demo", "demo", "mesh"),
    "generate": ("generate", "generate", ""),
    "chat": ("chat", "chat", ""),
    "embed": ("embed", "embed", ""),
    "transcribe": ("generate", "transcribe", ""),
    "models": ("mesh", "models", ""),
    "explain": ("explain", "explain", ""),
    "trace": ("explain", "trace", ""),
    "traces": ("traces", "traces", ""),
    "top": ("top", "top", ""),
    "requests": ("requests", "requests", ""),
    "cancel": ("requests", "cancel", ""),
    "drain": ("requests", "drain", ""),
    "logs": ("logs", "logs", "mesh"),
    "batch": ("batch", "batch", ""),
    "cache": ("tenants", "cache", ""),
    "keys": ("keys", "keys", "process"),
    "tenants": ("tenants", "tenants", ""),
    "feedback": ("explain", "feedback", ""),
    "safety": ("safety", "safety", ""),
    "drift": ("mesh", "drift", ""),
    "record": ("record", "record", "mesh"),
    "simulate": ("simulate", "simulate", "mesh"),
    "plan": ("simulate", "plan", "mesh"),
    "router": ("router", "router", "mesh"),
    "eval": ("evaluate", "evaluate", "mesh"),
    "bench": ("bench", "bench", "mesh"),
    "gateway": ("process", "gateway", "gateway"),
    "batcher": ("process", "batcher", "batcher"),
    "jobs": ("process", "jobs", "jobs"),
    "worker": ("process", "worker", "worker"),
}
"""Of each command: its module in this package, its function, the extra that it needs.

Without the extra a command is listed, shows its help, and says what to install when it is called; `eval` needs it only
for the support tasks.
"""

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "A mesh on this machine": ("up", "down", "status", "reload", "config", "logs", "certs", "demo"),
    "Ask": ("generate", "chat", "embed", "transcribe", "models"),
    "Offline jobs": ("batch",),
    "See what happens": ("top", "requests", "explain", "trace", "traces", "drift"),
    "Operate": ("cancel", "drain", "cache", "keys", "tenants", "safety"),
    "Improve and plan": (*("eval", "feedback", "router", "record", "simulate", "plan", "bench"),),
    "One process, for containers": ("gateway", "batcher", "jobs", "worker"),
}
"""The commands as help shows them."""

_AGAIN_S: Final = 0.05


class LazyCommands(CommandGroup):
    """Imports a command's module when the command is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # `get_command` makes them

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command called `cmd_name`, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"cli.{module}"), function)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)
        context = getattr(sys.modules[command.__module__], "CONTEXT_SETTINGS", None)
        single.command(cmd_name, context_settings=context)(
            expanded(command, with_json=module != "process")
        )
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by what they are for."""
        width = max(map(len, COMMANDS))
        limit = formatter.width - width - 6
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), one.get_short_help_str(limit)) for name, one in commands]
                )


def build() -> typer.Typer:
    """Return the application without loading any command's code."""
    app = typer.Typer(
        cls=LazyCommands,
        name="sluice",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=HELP,
    )
    app.callback()(_about)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; write errors to stderr, never a traceback."""
    words = list(arguments) or ["--help"]
    if words[0] == "help":
        words = [*words[1:], "--help"]
    as_json = "--json" in words
    command = typer.main.get_command(build())
    try:
        code = command.main(args=words, prog_name="sluice", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed it (`sluice models | head -1`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        return failure.report(_not_installed(error, words), as_json)
    except Exception as error:
        return failure.report(error, as_json)
    if code == 130:  # Typer's for Ctrl-C
        failure.report(failure.CommandFailed("CANCELLED", "interrupted"), as_json)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the `sluice` script."""
    _open_closed_streams()
    bypass_loopback()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Answers hold any character; a terminal that lacks one shows a replacement.
            stream.reconfigure(errors="replace")
    sys.unraisablehook = _interrupt_again
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Give a command that was started without stdin, stdout or stderr (`<&-`) empty ones."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  open as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C that came inside a finalizer or a callback of C code, where Python drops it, comes again."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


def _not_installed(error: ModuleNotFoundError, words: Sequence[str]) -> Exception:
    """Return what to install for the command in `words`, or the error itself if no extra has the module."""
    name = next((word for word in words if word in COMMANDS), "")
    extra = COMMANDS[name][2] if name else ""
    if not extra:
        return error
    message = (
        f"needs `pip install '.[{extra}]' ./distributions/mesh` in the tree of this release, or the same of its two "
        f"wheels (no module {error.name})"
    )
    return failure.CommandFailed("NOT_INSTALLED", message)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"sluice {__version__}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool,
        Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Sluice: tokens from small and large language models over one gRPC API.

    Start a mesh on this machine with `sluice up`, ask it with `sluice generate "..."`. Commands call the gateway that
    --address or SLUICE_ADDRESS name, else that of the mesh that runs in SLUICE_STATE_DIR, else 127.0.0.1:50051.
    """
