"""Files of commands: what they read, and what they write, which appears when it is complete."""

import csv
import errno
import gzip
import io
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TextIO

from typing_extensions import override

from cli.failure import CommandFailed
from sluice.errors import InputInvalid

PIECE_BYTES: Final = 256 * 1024
CELL_CHARS_MAX: Final = 16 << 20

_JSONL: Final = (".jsonl", ".ndjson")
_HEAD_BYTES: Final = 4096


@contextmanager
def open_table(path: Path) -> Iterator[tuple[Sequence[str], Iterator[Mapping[str, str | None]]]]:
    """The columns and the rows of a CSV file, plain or .gz, read as they come.

    Raises:
        OSError: it cannot be read.
        CommandFailed: it is no UTF-8 or no CSV; also while rows are taken.
    """
    csv.field_size_limit(CELL_CHARS_MAX)
    try:
        with _open_text(path) as file:
            reader = csv.DictReader(file)
            yield list(reader.fieldnames or ()), reader
    except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise CommandFailed("FILE", f"{path} is no CSV file in UTF-8: {error}") from error


def _open_text(path: Path) -> TextIO:
    # utf-8-sig: spreadsheets put a byte order mark first.
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def check_input(path: Path) -> None:
    """Looks at the beginning of the input of a job before it is sent.

    Raises:
        OSError: it is not there, or cannot be read.
        CommandFailed: it is empty, or is no JSONL though its name says so.
    """
    head = next(pieces(path, _HEAD_BYTES), b"")
    if not head:
        raise CommandFailed("INPUT_EMPTY", f"{path} is empty")
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if path.suffix.lower() in _JSONL and first not in (b"{", b""):
        message = f"{path} is not JSONL: its first line does not begin with '{{'"
        raise CommandFailed("NOT_JSONL", message)


def pieces(path: Path, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of a file in pieces of ``size``; raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def read_input(name: str) -> bytes:
    """What is in a file, or for "-" comes on stdin.

    Raises:
        InputInvalid: it cannot be read.
    """
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InputInvalid(f"{name}: {error.strerror}") from error


class NewFile:
    """A text file that is written; without `complete` nothing is left of it when the block ends.

    Attributes:
        path: its name once it is complete.

    Raises:
        CommandFailed: it cannot be written; the constructor raises it before anything was computed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of this command alone: another one may write the same file.
        self._scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            self._file = self._scratch.open("w", encoding="utf-8", errors="replace", newline="")
        except OSError as error:
            raise self.failed(error) from error

    @contextmanager
    def writing(self) -> Iterator[TextIO]:
        """What is written in the block goes into the file."""
        try:
            yield self._file
        except OSError as error:
            raise self.failed(error) from error

    def complete(self) -> None:
        """Puts the file in its place, also of an older one."""
        with self.writing() as file:
            file.close()
            self._scratch.replace(self.path)

    def failed(self, error: OSError) -> CommandFailed:
        """The error of the command when the file cannot be written."""
        return CommandFailed("FILE", f"{self.path} cannot be written: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what is left in its buffer does not fit on the disk either
            self._file.close()
        self._scratch.unlink(missing_ok=True)


class OutFile(NewFile):
    """Lines of JSON in a file.

    Attributes:
        hint: what to do when it cannot be written to the end.
    """

    def __init__(self, path: Path) -> None:
        self.hint = ""
        self.lines = 0
        super().__init__(path)

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line."""
        with self.writing() as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.lines += 1

    @override
    def failed(self, error: OSError) -> CommandFailed:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "DISK_FULL" if full else "OUTPUT_NOT_WRITABLE"
        hint = f"; {self.hint}" if self.hint else ""
        return CommandFailed(reason, f"{super().failed(error)}{hint}")


@contextmanager
def opened(path: Path | None) -> Iterator[OutFile | None]:
    """The file at ``path``, if there is one to write; unless it was completed nothing is left of it."""
    if path is None:
        yield None
        return
    with OutFile(path) as file:
        yield file
