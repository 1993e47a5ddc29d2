"""Rows of a CSV file, plain or .gz, read as they come."""

import csv
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from cli.failure import CommandFailed

CELL_CHARS_MAX: Final = 16 << 20


@contextmanager
def open_table(path: Path) -> Iterator[tuple[Sequence[str], Iterator[Mapping[str, str | None]]]]:
    """The columns and the rows of the file at ``path``.

    Raises:
        CommandFailed: it cannot be read, or is no UTF-8 or no CSV; also while rows are taken.
    """
    csv.field_size_limit(CELL_CHARS_MAX)
    try:
        with _open(path) as file:
            reader = csv.DictReader(file)
            yield list(reader.fieldnames or ()), reader
    except OSError as error:
        raise CommandFailed("FILE", f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise CommandFailed("FILE", f"{path} is no CSV file in UTF-8: {error}") from error


def _open(path: Path) -> TextIO:
    # utf-8-sig: spreadsheets put a byte order mark first.
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")
