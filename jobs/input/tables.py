"""Rows of CSV and Parquet, as they come; where a row cannot be used there is a reason in its place."""

import csv
import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

from jobs.input.template import Template
from sluice.errors import InputInvalid

PROMPT: Final = Template("{prompt}")
"""What makes the prompts of a table when no template is given."""

_ROWS: Final = 256

Row = tuple[int, Mapping[str, Any] | str]


def csv_rows(stream: BinaryIO, template: Template, cell_chars_max: int) -> Iterator[Row]:
    """The rows below the header, each with the number of its first line.

    Raises:
        InputInvalid: a column of the template is missing, or a quote is never closed.
    """
    csv.field_size_limit(cell_chars_max)  # of the whole process
    # utf-8-sig: spreadsheets put a byte order mark first. Bytes that are no UTF-8 make their row a bad one.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text)
    line = 1
    try:
        header = next(reader, [])
        _check(template, header)
        line = reader.line_num + 1
        for cells in reader:
            if len(cells) == len(header):
                yield line, dict(zip(header, cells, strict=True))
            elif cells:
                yield line, f"has {len(cells)} cells, the header {len(header)}"
            line = reader.line_num + 1
    except csv.Error as error:
        hint = "is a quote not closed?"
        raise InputInvalid(f"line {line}: is no CSV: {error}; {hint}") from error


def parquet_rows(stream: BinaryIO, template: Template, ids: Sequence[str]) -> Iterator[Row]:
    """The rows with their numbers from 1, of the columns that the template needs.

    Raises:
        InputInvalid: it is no Parquet, or a column of the template is missing.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        hint = "pip install 'pyarrow>=18,<24' where jobs run"
        raise InputInvalid(f"Parquet needs `{hint}`") from error

    with tempfile.TemporaryFile() as file:
        shutil.copyfileobj(stream, file)  # the directory of a Parquet file stands at its end
        try:
            source = pq.ParquetFile(file)
            names = source.schema_arrow.names
            _check(template, names)
            columns = [name for name in names if name in template.columns or name in ids]
            number = 0
            for batch in source.iter_batches(batch_size=_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputInvalid(f"the input is no Parquet: {error}") from error


def _check(template: Template, columns: Sequence[str]) -> None:
    if missing := template.missing(frozenset(columns)):
        hint = "" if template is not PROMPT else "; a template makes prompts out of other columns"
        have = ", ".join(columns) or "none"
        raise InputInvalid(f"no column {', '.join(missing)}: the input has {have}{hint}")
