"""Output of commands: JSON for programs, and for people text with aligned columns."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from shutil import get_terminal_size
from typing import Any, Final, TextIO

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from cli.commands import wants_json
from cli.escaping import printable
from cli.failure import CommandFailed
from sluice.client import AnswerStream
from sluice.client.answer import Answer, AnswerBuilder, Delta
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

_CONTROL: Final = dict.fromkeys(
    {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\N{REPLACEMENT CHARACTER}"
)

WIDTH_MAX: Final = 100
"""Columns of text for people, also where no terminal says how many it has."""
_NO_TERMINALS: Final = (None, "", "dumb")
"""Values of TERM without escape sequences."""
_LARGE: Final = 1e4
"""Numbers from this on have no fraction that matters."""

_MAY_BE_LEFT_OUT: Final = frozenset(
    {"stop", "rules", "logprobs", "reasoning", "tool_calls", "attempts", "notices"}
)
"""Fields of an answer that are left out when they are empty."""


def write_line(text: str = "") -> None:
    """Write a line for people."""
    print(printable(text))


def write_json(value: Any) -> None:
    """Write one JSON value on one line of stdout."""
    print(printable(json.dumps(value, ensure_ascii=False)), flush=True)


def show(
    described: Any,
    text: str | Callable[[], object] | None = None,
    failed: tuple[str, str] | None = None,
) -> None:
    """Print the result of a command: `described` as JSON, or `text`, which may print itself; None: as a tree.

    Raises:
        CommandFailed: not all was done that was asked: `failed` is the reason and the message.
    """
    if not wants_json():
        if callable(text):
            text()
        else:
            write_line("\n".join(tree(described)) if text is None else text)
    if failed:
        raise CommandFailed(*failed, described)
    if wants_json():
        write_json(described)


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Write text of a model at once; on a terminal, replace control characters so that an answer cannot steer it."""
    stream = stream or sys.stdout
    stream.write(text.translate(_CONTROL) if stream.isatty() else text)
    stream.flush()


def write_answer(stream: AnswerStream, builder: AnswerBuilder | None = None) -> None:
    """Print an answer as it comes, and collect it in `builder`; as JSON once it is complete.

    Reasoning goes to stderr. The line ends even when the answer breaks off.
    """
    builder, is_shown, thinks = builder or AnswerBuilder(), not wants_json(), False
    try:
        for event in stream:
            builder.add(event)
            if not (is_shown and isinstance(event, Delta)):
                continue
            if event.reasoning:
                thinks = True
                write_text(event.reasoning, sys.stderr)
            if event.text:
                write_text("\n" if thinks else "", sys.stderr)
                thinks = False
                write_text(event.text)
    finally:
        if is_shown and builder.text:
            write_text("\n")
    show_answer(builder.build())


def show_answer(answer: Answer, text: str = "") -> None:
    """Print an answer as JSON; else `text`, its tool calls, one a line, and a note."""
    if wants_json():
        write_json(answer_object(answer))
        return
    write_text(text)
    for call in answer.tool_calls:
        write_json(message_object(call))
    note(summary(answer))
    note(f"request {answer.request_id} · trace {answer.trace_id}")


def note(text: str) -> None:
    """Write a note for people: on stderr, and only when stderr is a terminal."""
    if sys.stderr.isatty():
        write_styled(text, err=True, dim=True)


def progress(text: str) -> None:
    """Write a step of what a command does, unless it prints JSON: on stderr, into a file or a pipe too."""
    if not wants_json():
        write_styled(text, err=True, dim=True)


def write_styled(text: str, **style: Any) -> None:
    """Write a line as `typer.secho` does: in a colour, or dim, on a terminal that may have colours."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in _NO_TERMINALS
    typer.secho(printable(text), color=False if is_plain else None, **style)


def can_move(stream: TextIO) -> bool:
    """Tell whether `stream` is a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM") not in _NO_TERMINALS


def confirm(question: str) -> None:
    """Ask before something is done that cannot be undone; closed input means no.

    Raises:
        CommandFailed: the answer is not yes.
    """
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not sys.stdin.isatty():
        print(file=sys.stderr)  # no terminal has echoed a line's end
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandFailed("CANCELLED", "aborted; use --yes to go on without the question")


def folded(line: str, indent: int) -> str:
    """Break a line that is wider than the output between words; what follows is indented."""
    return textwrap.fill(
        line,
        max(text_width(), 2 * indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def tree(described: Mapping[str, Any], indent: int = 0) -> Iterator[str]:
    """Yield an object as text: a line for each value that is set, with those of an object below its name."""
    for name, value in described.items():
        for one in value if isinstance(value, list) else [value]:
            if not one:
                continue
            if isinstance(one, Mapping):
                yield f"{' ' * indent}{name}"
                yield from tree(one, indent + 2)
            else:
                yield folded(f"{' ' * indent}{name} {cell(one)}", indent + 4)


def text_width() -> int:
    """Return how many columns text for people may have: those of the terminal, at most `WIDTH_MAX`."""
    return min(WIDTH_MAX, get_terminal_size((WIDTH_MAX, 24)).columns)


def write_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], keys: int | None = None
) -> None:
    """Print a table (`aligned`).

    With `keys`, a table that is too wide is printed in parts, each with this many of the first columns.
    """
    listed = [[*map(cell, row)] for row in rows]
    parts = [range(len(headers))] if keys is None else list(_parts(headers, listed, keys))
    tables = [
        aligned([headers[i] for i in part], [[row[i] for i in part] for row in listed])
        for part in parts
    ]
    write_text("\n".join("".join(f"{line}\n" for line in table) for table in tables))


def write_records(records: Sequence[Mapping[str, object]], keys: int | None = None) -> None:
    """Print a table whose headers are the keys of `records`; nothing without any."""
    if records:
        write_table(list(records[0]), [list(record.values()) for record in records], keys)


def _parts(
    headers: Sequence[str], rows: Sequence[Sequence[str]], keys: int
) -> Iterator[Sequence[int]]:
    """Yield the columns of each part of a table, as many as fit the width."""
    columns = zip(headers, *rows, strict=True)
    widths = [max(map(len, column)) + 2 for column in columns]
    room = text_width() + 2 - sum(widths[:keys])
    part, used = list(range(keys)), 0
    for place in range(keys, len(headers)):
        if used and used + widths[place] > room:
            yield part
            part, used = list(range(keys)), 0
        part.append(place)
        used += widths[place]
    yield part


def aligned(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, None as a dash; columns of numbers are aligned to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    right = [all(_is_number(row[i]) for row in cells) for i in range(len(headers))]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in (headers, *cells)
    ]


def cell(value: object) -> str:
    """Return a value as text of one line: None is a dash, a float has four digits or those before its point."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < _LARGE else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return " ".join(map(cell, value))
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{cell(one)}" for name, one in value.items())
    return printable(str(value).replace("\n", "\\n"))


def answer_object(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON, without empty fields, and without attempts if there was only one."""
    described = {"tier": answer.tier, **_described(answer)}
    described["attempts"] = [
        {"model": attempt.model, "usage": message_object(attempt.usage)}
        for attempt in answer.attempts
    ]
    for name in _MAY_BE_LEFT_OUT:
        if not described[name] or (name == "attempts" and len(answer.attempts) == 1):
            del described[name]
    return described


def _described(value: Any) -> Any:
    """Return a value of an answer as JSON."""
    if is_dataclass(value):
        return {field.name: _described(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [*map(_described, value)]
    return message_object(value) if isinstance(value, Message) else value


def message_object(message: Any) -> dict[str, Any]:
    """Return a message as JSON: fields by name, zero or null where nothing is set.

    Enums are words, bytes lists of numbers, durations seconds.
    """
    return {field.name: _field_value(message, field) for field in message.DESCRIPTOR.fields}


def _field_value(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [message_object(one) if kind else one for one in value]
    if field.enum_type is not None:
        return word_of(EnumTypeWrapper(field.enum_type), value)
    if field.has_presence and not message.HasField(field.name):
        return None
    if kind is None:
        return [*value] if isinstance(value, bytes) else value
    if kind.full_name == "google.protobuf.Duration":
        return ms_of(value) / 1e3
    return message_object(value)


def summary(answer: Answer) -> str:
    """Return one line for people with model, tokens and times of an answer."""
    timings = answer.timings
    why = f" ({', '.join(answer.rules)})" if answer.rules else ""
    why += " (kept)" if answer.usage.cached else ""
    return (
        f"{answer.model} ({answer.route.strategy}: {answer.route.reason})"
        f" · {answer.usage.completion_tokens} tokens · {answer.finish_reason}{why}"
        f" · first token {timings.time_to_first_token_ms:.0f} ms · total {timings.total_ms:.0f} ms"
    )


def _is_number(cell: str) -> bool:
    return cell.rstrip("%").replace(".", "", 1).isdigit() or cell == "-"
