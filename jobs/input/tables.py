"""Rows of each format as they come: fields by name, or the reason why a row cannot be used."""

import csv
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO, Final

from jobs.input.parquet_child import MEMORY_BYTES
from jobs.input.stream import lines
from jobs.input.template import Template
from jobs.threads import ReadingStopped, StopSignal
from sluice.errors import InputInvalid
from sluice.openai.fields import BadJson, load_json

PROMPT: Final = Template("{prompt}")
"""Template of text, and of tables if none is given."""

ROW_LINES_MAX: Final = 4
"""A row of CSV may be as long as this many of the longest lines."""
PARQUET_BYTES_MAX: Final = 4 << 30
"""Largest Parquet file, in bytes."""
PIECE_BYTES: Final = 1 << 20
"""Bytes that are copied at a time."""
SPACE: Final = b" \t\r\n\xef\xbb\xbf"

Row = Mapping[str, Any] | str
Rows = Iterator[tuple[int, Row]]
"""Rows with their numbers from 1; those of lines have the number of their first line."""


def json_row(line: bytes | None, line_bytes_max: int) -> Row:
    """Return the object of a line, or why it has none; None is a line that is too long."""
    if line is None or len(line) > line_bytes_max:
        return f"is longer than {line_bytes_max} bytes"
    try:
        value = load_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "is not valid UTF-8"
    except BadJson as error:
        return str(error)
    return value if isinstance(value, dict) else "is no JSON object"


def json_rows(stream: BinaryIO, line_bytes_max: int) -> Rows:
    """Yield the objects of lines that are not empty."""
    for number, line in lines(stream, line_bytes_max):
        if line is None or line.strip(SPACE):
            yield number, json_row(line, line_bytes_max)


def text_rows(stream: BinaryIO, line_bytes_max: int) -> Rows:
    """Yield the prompts of lines that are not empty."""
    for number, line in lines(stream, line_bytes_max):
        if line is None:
            yield number, f"is longer than {line_bytes_max} bytes"
        elif line.strip(SPACE):
            yield number, {"prompt": line.decode("utf-8", "surrogateescape").strip()}


def csv_rows(stream: BinaryIO, template: Template, line_bytes_max: int) -> Rows:
    """Yield the rows below the header.

    Raises:
        InputInvalid: a column of the template is missing, a quote is not closed, a row is too long, or too many lines
            are empty.
    """
    row_bytes_max, row_bytes, line = ROW_LINES_MAX * line_bytes_max, 0, 1

    def texts() -> Iterator[str]:
        nonlocal row_bytes
        for number, data in lines(stream, line_bytes_max):
            row_bytes += 0 if data is None else len(data)
            if data is None or row_bytes > row_bytes_max:
                raise InputInvalid(
                    f"line {number}: is longer than {line_bytes_max} bytes, or its row has over "
                    f"{row_bytes_max}; check for an unclosed quote"
                )
            # Spreadsheets write a byte order mark. Bytes that are not UTF-8 make their row a bad line.
            yield data.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")

    csv.field_size_limit(line_bytes_max)  # applies to the whole process
    reader = csv.reader(texts())
    try:
        header = next(reader, [])
        _check(template, header)
        line, row_bytes = reader.line_num + 1, 0
        for cells in reader:
            if len(cells) == len(header):
                yield line, dict(zip(header, cells, strict=True))
            elif cells:
                yield line, f"has {len(cells)} cells, the header {len(header)}"
            line, row_bytes = reader.line_num + 1, 0
    except csv.Error as error:
        raise InputInvalid(f"line {line}: is not CSV; check for an unclosed quote") from error


def parquet_rows(
    stream: BinaryIO, template: Template, ids: Sequence[str], stop: StopSignal
) -> Rows:
    """Yield the rows, of the columns in use; a child process reads them, which `stop` ends.

    Raises:
        InputInvalid: it is no Parquet, takes too much space, memory or time, lacks a column of the template, or
            pyarrow is not installed.
        ReadingStopped: after `stop`.
    """
    if importlib.util.find_spec("pyarrow") is None:
        hint = "pip install 'pyarrow>=18,<24' where jobs run"
        raise InputInvalid(f"Parquet needs pyarrow: `{hint}`")
    with tempfile.TemporaryFile() as file:
        # The directory of a Parquet file stands at its end.
        while piece := stream.read(PIECE_BYTES):
            file.write(piece)
            if file.tell() > PARQUET_BYTES_MAX:
                raise InputInvalid(
                    f"the Parquet has over {PARQUET_BYTES_MAX >> 30} GiB; split it into several files"
                )
        file.seek(0)
        columns = json.dumps([*template.columns, *ids])
        child = subprocess.Popen(
            [sys.executable, "-m", "jobs.input.parquet_child", columns],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout is not None
        stop.add_done_callback(lambda _: child.kill())
        try:
            yield from _rows_of(child.stdout, template, stop)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _rows_of(output: IO[bytes], template: Template, stop: StopSignal) -> Rows:
    """Yield the rows between the columns and None, the first and last line of the child process."""
    for number, line in enumerate(output):
        message = json.loads(line)
        if message is None:
            return
        if number:
            yield number, message
        else:
            _check(template, message)
    if stop.done():
        raise ReadingStopped
    raise InputInvalid(
        f"the input is no Parquet, is damaged, or takes more than {MEMORY_BYTES >> 20} MiB or too "
        "much time to read; write it again with smaller row groups and values"
    )


def _check(template: Template, columns: Sequence[str]) -> None:
    if missing := sorted(template.columns.difference(columns)):
        hint = "" if template is not PROMPT else "; a template makes prompts out of other columns"
        have = ", ".join(columns) or "none"
        raise InputInvalid(f"no column {', '.join(missing)}: the input has {have}{hint}")
