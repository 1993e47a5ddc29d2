"""Error reports of commands: one line on stderr, and with --json an object on stdout."""

import json
import sys
from typing import Any, Final

import typer

from cli.escaping import printable

UNEXPECTED: Final = "INTERNAL"


class CommandFailed(Exception):
    """A command ran and did not do what was asked.

    Attributes:
        reason: a word in capitals.
        done: the part of the result that there is; with --json it is printed with the error.
    """

    def __init__(self, reason: str, message: str, done: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.done = done or {}


def report(error: Exception, as_json: bool) -> int:
    """Write `error` to stderr, with --json to stdout; return the exit code.

    With --json stderr gets it too, unless a terminal shows both.
    """
    described = describe(error)
    if as_json:
        done = error.done if isinstance(error, CommandFailed) else {}
        print(json.dumps({**done, "error": described}), flush=True)
    if not (as_json and sys.stdout.isatty() and sys.stderr.isatty()):
        message = _printed(described["message"], keep_lines=described["reason"] == "SETUP")
        text = printable(f"sluice: {described['reason']}: {message}")
        print(text, file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, typer.TyperException) else 1


def describe(error: Exception) -> dict[str, Any]:
    """Return `reason` and `message`, and code, metadata, violations and retry_after_s where present."""
    # Imported when something failed, so that a command that works does not wait for them.
    from sluice.errors import SettingsError, SetupError, SluiceError

    if isinstance(error, SluiceError):
        return _of_mesh(error)
    if isinstance(error, CommandFailed):
        return {"reason": error.reason, "message": str(error)}
    if isinstance(error, typer.TyperException):
        return {"reason": "USAGE", "message": _with_help(error)}
    if isinstance(error, SetupError | SettingsError):
        return {"reason": "SETUP", "message": str(error)}
    if isinstance(error, OSError) and error.filename is not None:
        reason = "NO_SUCH_FILE" if isinstance(error, FileNotFoundError) else "FILE"
        message = f"{error.filename} cannot be read: {error.strerror}"
        return {"reason": reason, "message": message}
    return {"reason": UNEXPECTED, "message": f"{type(error).__name__}: {error}"}


def _printed(message: str, *, keep_lines: bool) -> str:
    """Put a message into one line, but for those that list problems of a configuration."""
    lines = message.split("\n") if keep_lines else [message]
    return "\n".join(
        f"{'  ' * line.startswith('  ')}{' '.join(line.split())}" for line in lines if line.strip()
    )


def _with_help(error: typer.TyperException) -> str:
    """Say what was used wrongly, and name the help of the command unless something better is suggested."""
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    if context is None or message.endswith("?"):
        return message
    return f"{message}; see: {context.command_path} --help"


def _of_mesh(error: Any) -> dict[str, Any]:
    from cli.target import last_target
    from sluice.client.channel import ConnectionLost

    message, target = error.message, last_target()
    if isinstance(error, ConnectionLost) and target is not None:
        message = target.unreachable(message)
    described: dict[str, Any] = {
        "reason": error.reason,
        "message": message,
        "code": error.code.name,
        "metadata": error.metadata,
    }
    if error.violations:
        described["violations"] = [
            {"field": v.field, "description": v.description} for v in error.violations
        ]
    if error.retry_after_s is not None:
        described["retry_after_s"] = error.retry_after_s
    return described
