"""Rows of CSV and Parquet as they come; a row that cannot be used is replaced by the reason."""

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

PROMPT: Final = Template("{prompt}")
"""Template of tables if none is given."""

ROW_LINES_MAX: Final = 4
"""A row of CSV may be as long as this many of the longest lines."""
PARQUET_BYTES_MAX: Final = 4 << 30
"""Largest Parquet file, in bytes."""
PIECE_BYTES: Final = 1 << 20
"""Bytes that are copied at a time."""

Row = tuple[int, Mapping[str, Any] | str]


def csv_rows(stream: BinaryIO, template: Template, line_bytes_max: int) -> Iterator[Row]:
    """Yield the rows below the header, each with the number of its first line.

    Raises:
        InputInvalid: a column of the template is missing, a quote is not closed, or a row is too long.
    """
    csv.field_size_limit(line_bytes_max)  # applies to the whole process
    text = _CsvLines(stream, line_bytes_max)
    reader = csv.reader(text)
    line = 1
    try:
        header = next(reader, [])
        _check(template, header)
        line = reader.line_num + 1
        text.row_bytes = 0
        for cells in reader:
            if len(cells) == len(header):
                yield line, dict(zip(header, cells, strict=True))
            elif cells:
                yield line, f"has {len(cells)} cells, the header {len(header)}"
            line = reader.line_num + 1
            text.row_bytes = 0
    except csv.Error as error:
        raise InputInvalid(f"line {line}: is not CSV; check for an unclosed quote") from error


class _CsvLines:
    """Lines of a CSV.

    Attributes:
        row_bytes: bytes of the current row, which may have several lines.
    """

    def __init__(self, stream: BinaryIO, line_bytes_max: int) -> None:
        self.row_bytes = 0
        self._lines = lines(stream, line_bytes_max)
        self._most = line_bytes_max

    def __iter__(self) -> "_CsvLines":
        return self

    def __next__(self) -> str:
        number, line = next(self._lines)
        self.row_bytes += 0 if line is None else len(line)
        if line is None or self.row_bytes > ROW_LINES_MAX * self._most:
            raise InputInvalid(
                f"line {number}: is longer than {self._most} bytes, or its row has over "
                f"{ROW_LINES_MAX * self._most}; check for an unclosed quote"
            )
        # Spreadsheets write a byte order mark. Bytes that are not UTF-8 make their row a bad line.
        return line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")


def parquet_rows(
    stream: BinaryIO, template: Template, ids: Sequence[str], stop: StopSignal
) -> Iterator[Row]:
    """Yield the rows with their numbers from 1, of the columns in use; a child process reads them.

    Raises:
        InputInvalid: it is no Parquet, is too large, or a column of the template is missing.
    """
    if importlib.util.find_spec("pyarrow") is None:
        hint = "pip install 'pyarrow>=18,<24' where jobs run"
        raise InputInvalid(f"Parquet needs pyarrow: `{hint}`")
    with tempfile.TemporaryFile() as file:
        size = 0
        while piece := stream.read(
            PIECE_BYTES
        ):  # the directory of a Parquet file stands at its end
            size += len(piece)
            if size > PARQUET_BYTES_MAX:
                raise InputInvalid(
                    f"the Parquet has over {PARQUET_BYTES_MAX >> 30} GiB; split it into several files"
                )
            file.write(piece)
        file.flush()
        file.seek(0)
        columns = json.dumps([*template.columns, *ids])
        child = subprocess.Popen(
            [sys.executable, "-m", "jobs.input.parquet_child", columns],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout is not None
        stop.then(child.kill)
        try:
            yield from _rows_of(child.stdout, template)
        except InputInvalid:
            if stop.is_set:
                raise ReadingStopped from None
            raise
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _rows_of(output: IO[bytes], template: Template) -> Iterator[Row]:
    number = 0
    for line in output:
        message = json.loads(line)
        number += 1
        if isinstance(message, str):
            yield number, message
        elif "row" in message:
            yield number, message["row"]
        elif "columns" in message:
            number -= 1
            _check(template, message["columns"])
        elif "error" in message:
            raise InputInvalid(message["error"])
        else:
            return
    raise InputInvalid(
        f"the Parquet takes more than {MEMORY_BYTES >> 20} MiB or too much time to read; write "
        "smaller row groups and values"
    )


def _check(template: Template, columns: Sequence[str]) -> None:
    if missing := template.missing(frozenset(columns)):
        hint = "" if template is not PROMPT else "; a template makes prompts out of other columns"
        have = ", ".join(columns) or "none"
        raise InputInvalid(f"no column {', '.join(missing)}: the input has {have}{hint}")
