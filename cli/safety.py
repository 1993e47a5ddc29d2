"""`sluice safety`: checks a text against the policies of the mesh, and shows the counts of a dry run."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from typer import Argument

from cli import options, output
from cli.commands import Commands
from cli.files import read_input
from sluice.v1.safety_pb2 import CheckTextResponse

_MOVE: Final = ("rule", "now", "then", "count")


safety = Commands("Check texts against the safety policies.")


@safety.command()
def check(
    *,
    what: str = Argument(..., help='A text, a file, or "-" for stdin.', metavar="TEXT|FILE|-"),
    label: options.Label = None,
    client: options.OperatorClient,
) -> None:
    """Show the findings in a text, the actions on them, and the text for the model; also when it would be blocked."""
    text = _read(what)
    checked = client.check_safety(text, options.labels_of(label))
    described = output.message_object(checked)
    output.show(described, lambda: _show(text, checked, described["findings"]))


@safety.command()
def dry_run(client: options.OperatorClient) -> None:
    """Show what a policy under trial would have done otherwise."""
    counted = client.safety_dry_run()
    described = output.message_object(counted)
    del described["gateways"]
    for move in described["moves"]:
        for side in ("now", "then"):
            move[side] = move[side].replace("unspecified", "none")

    def write() -> None:
        if counted.moves:
            output.write_table(_MOVE, ([move[key] for key in _MOVE] for move in described["moves"]))
        changed = f"{counted.changed} of {counted.texts} texts"
        output.write_line(f"{changed} would change under policy {counted.policy}")

    output.show(described, write)


def _show(text: str, checked: CheckTextResponse, findings: Sequence[Mapping[str, Any]]) -> None:
    if findings:
        rows = [
            (f["rule"], f["severity"], f["action"], f"{start}-{end}", _excerpt(text[start:end]))
            for f in findings
            for start, end in [(f["start"], f["end"])]
        ]
        output.write_table(("rule", "severity", "action", "place", "text"), rows)
    else:
        output.write_line("nothing found")
    route = f" to {checked.model}" if checked.model else ""
    output.write_line(
        f"{'blocked' if checked.blocked else 'passes' + route} by policy {checked.policy}"
    )
    if not checked.blocked and checked.text != text:
        output.write_line("the model would see:")
        output.write_text(checked.text + "\n")


def _excerpt(text: str) -> str:
    """Return at most 32 characters of `text`; what cannot be seen is spelled out."""
    excerpt = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:32]
    )
    return excerpt if len(excerpt) <= 32 and len(text) <= 32 else excerpt[:31] + "…"


def _read(what: str) -> str:
    with suppress(OSError, ValueError):  # not a valid path
        if what == "-" or Path(what).is_file():
            return options.text_of(read_input(what), "text")
    return what
