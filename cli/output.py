"""Output of commands: JSON for programs, aligned columns for files and pipes, a table with lines for a terminal."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final, TextIO

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from sluice.client import AnswerStream
from sluice.client.answer import Answer, AnswerBuilder, Delta, Event
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

_CONTROL: Final = dict.fromkeys(
    {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\N{REPLACEMENT CHARACTER}"
)


def write_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def show(as_json: bool, described: Any, text: str | Callable[[], object]) -> None:
    """What a command has to say: ``described`` for programs, or for people ``text``, which may print itself."""
    if as_json:
        write_json(described)
    elif callable(text):
        text()
    else:
        print(text)


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Text of a model, at once. On a terminal without control characters: an answer must not steer the terminal."""
    stream = stream or sys.stdout
    stream.write(text.translate(_CONTROL) if stream.isatty() else text)
    stream.flush()


def write_answer(stream: AnswerStream, as_json: bool) -> None:
    """An answer as it comes, with its calls of tools and a note behind it; as JSON when it is complete."""
    if as_json:
        write_json(answer_object(stream.answer()))
        return
    builder = AnswerBuilder()
    write_events(stream, builder)
    answer = builder.build()
    write_calls(answer)
    note(summary(answer))


def write_events(events: Iterable[Event], builder: AnswerBuilder) -> None:
    """Writes the text of `events` as they come and adds them to `builder`; ends the line even when they break off.

    Reasoning goes to stderr.
    """
    thinks = False
    try:
        for event in events:
            builder.add(event)
            if not isinstance(event, Delta):
                continue
            if event.reasoning:
                thinks = True
                write_text(event.reasoning, sys.stderr)
            if event.text:
                write_text("\n" if thinks else "", sys.stderr)
                thinks = False
                write_text(event.text)
    finally:
        if builder.text:
            write_text("\n")


def write_calls(answer: Answer) -> None:
    """The calls of tools, one a line."""
    for call in answer.tool_calls:
        write_json(asdict(call))


def note(text: str) -> None:
    """A note for people: on stderr, and only when stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\x1b[2m{text}\x1b[0m", file=sys.stderr, flush=True)


def write_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns of numbers are aligned to the right."""
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(headers))]
    if sys.stdout.isatty():
        _write_rich(headers, rows, right)
    else:
        _write_plain(headers, rows, right)


def answer_object(answer: Answer) -> dict[str, Any]:
    """An answer for `--json`."""
    described: dict[str, Any] = {
        "request_id": answer.request_id,
        "trace_id": answer.trace_id,
        "model": answer.model,
        "tier": answer.tier,
        "route": asdict(answer.route),
        "seed": answer.seed,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "timings": asdict(answer.timings),
    }
    if answer.stop:
        described["stop"] = answer.stop
    if answer.rules:
        described["rules"] = answer.rules
    if answer.logprobs:
        described["logprobs"] = [asdict(entry) for entry in answer.logprobs]
    if answer.reasoning:
        described["reasoning"] = answer.reasoning
    if answer.tool_calls:
        described["tool_calls"] = [asdict(call) for call in answer.tool_calls]
    if len(answer.attempts) > 1:
        described["attempts"] = [asdict(one) for one in answer.attempts]
    if answer.notices:
        described["notices"] = [asdict(notice) for notice in answer.notices]
    return described


def message_object(message: Any) -> dict[str, Any]:
    """A message as JSON, its fields by name, enums as words, those that are not set with their zero."""
    described: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            described[field.name] = dict(value)
        elif field.is_repeated:
            described[field.name] = [
                message_object(one) if field.message_type else one for one in value
            ]
        elif field.enum_type is not None:
            described[field.name] = word_of(EnumTypeWrapper(field.enum_type), value)
        elif field.message_type is None:
            described[field.name] = value
        elif not message.HasField(field.name):
            described[field.name] = None
        elif field.message_type.full_name == "google.protobuf.Duration":
            described[field.name] = ms_of(value) / 1e3
        else:
            described[field.name] = message_object(value)
    return described


def summary(answer: Answer) -> str:
    """Model, tokens and times of an answer, in one line for people."""
    timings = answer.timings
    why = f" ({', '.join(answer.rules)})" if answer.rules else ""
    why += " (kept)" if answer.usage.cached else ""
    return (
        f"{answer.model} ({answer.route.strategy}: {answer.route.reason})"
        f" · {answer.usage.completion_tokens} tokens · {answer.finish_reason}{why}"
        f" · first token {timings.time_to_first_token_ms:.0f} ms · total {timings.total_ms:.0f} ms"
        f" · trace {answer.trace_id}"
    )


def _is_number(cell: str) -> bool:
    return cell.rstrip("%").replace(".", "", 1).isdigit() or cell == "-"


def _write_plain(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> None:
    lines = [headers, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _write_rich(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for header, to_right in zip(headers, right, strict=True):
        table.add_column(header, justify="right" if to_right else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
