"""`sluice safety check`: what the policies of the mesh make of a text."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.cli import options, output
from sluice.client.blocking import Client
from sluice.client.safety import SafetyCheck
from sluice.errors import InvalidRequest


def safety(
    action: Annotated[Literal["check"], typer.Argument(metavar="check", show_default=False)],
    what: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help='A text; the path of a file that exists reads it, "-" reads stdin.',
            show_default=False,
        ),
    ],
    label: options.Label = None,
    address: options.Address = options.ADDRESS,
    as_json: options.Json = False,
) -> None:
    """Show what is found in a text, what is done about it, and what a model would see.

    Exit code 0 when it could be checked, also when it would be blocked.
    """
    text = _read(what)
    with Client(address) as client:
        checked = client.check_safety(text, options.labels_of(label))
    if as_json:
        output.write_json(asdict(checked))
        return
    _show(text, checked)


def _show(text: str, checked: SafetyCheck) -> None:
    if checked.findings:
        rows = [
            (f.rule, f.severity, f.action, f"{f.start}-{f.end}", _excerpt(text[f.start : f.end]))
            for f in checked.findings
        ]
        output.write_table(("rule", "severity", "action", "place", "text"), rows)
    else:
        print("nothing found")
    route = f" to {checked.model}" if checked.model else ""
    print(f"{'blocked' if checked.blocked else 'passes' + route} by policy {checked.policy}")
    if not checked.blocked and checked.text != text:
        print("the model would see:")
        output.write_text(checked.text + "\n")


def _excerpt(text: str) -> str:
    """At most 32 characters; what cannot be seen is spelled out."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:32]
    )
    return shown if len(shown) <= 32 and len(text) <= 32 else shown[:31] + "…"


def _read(what: str) -> str:
    if what == "-":
        return _decoded(sys.stdin.buffer.read())
    if not _is_file(what):
        return what
    try:
        return _decoded(Path(what).read_bytes())
    except OSError as error:
        raise InvalidRequest.of("text", f"{what} cannot be read: {error.strerror}") from error


def _is_file(what: str) -> bool:
    try:
        return Path(what).is_file()
    except (OSError, ValueError):
        return False  # too long or too strange for a path


def _decoded(given: bytes) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        byte, where = given[error.start], error.start
        raise InvalidRequest.of(
            "text", f"is not valid UTF-8: byte 0x{byte:02x} at offset {where}"
        ) from error
