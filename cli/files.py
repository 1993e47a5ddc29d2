"""Files of commands: what they read, and what they write, which appears when it is complete."""

import csv
import errno
import gzip
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from cli.failure import CommandFailed
from sluice.errors import InputInvalid

PIECE_BYTES: Final = 256 * 1024
CELL_CHARS_MAX: Final = 16 << 20

_JSONL: Final = (".jsonl", ".ndjson")
_HEAD_BYTES: Final = 4096
_DESCRIPTORS: Final = Path("/proc/self/fd")


@contextmanager
def open_table(path: Path) -> Iterator[tuple[Sequence[str], Iterator[Mapping[str, str | None]]]]:
    """Read the columns and the rows of a CSV file, plain or .gz, as they come.

    Raises:
        OSError: it cannot be read.
        CommandFailed: it is no UTF-8 or no CSV; also while rows are taken.
    """
    csv.field_size_limit(CELL_CHARS_MAX)
    try:
        # utf-8-sig: spreadsheets put a byte order mark first.
        opening = gzip.open if path.suffix == ".gz" else open
        with opening(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            yield list(reader.fieldnames or ()), reader
    except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise CommandFailed("FILE", f"{path} is no CSV file in UTF-8: {error}") from error


def check_input(path: Path) -> None:
    """Check the beginning of the input of a job before it is sent.

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
    """Yield the bytes of a file in pieces of `size`."""
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def read_input(name: str) -> bytes:
    """Return the content of a file, or of stdin for "-".

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
    """A text file that appears under its name once it is complete; else nothing is left of it when the block ends.

    1. Until then it has a hidden name beside its own. A symbolic link stays, and what it points to is replaced. A file
       that is replaced keeps its permissions.
    2. A device, a pipe or an open descriptor such as /dev/stdout is not replaced but written to, at once.

    Attributes:
        path: its name once it is complete.
        hint: what to do when it cannot be written to the end.
        stream: the open file.

    Raises:
        CommandFailed: it cannot be written; the constructor raises it before anything was computed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.hint = path, ""
        self._target = Path(os.path.realpath(path))
        # Of this command alone: another one may write the same file.
        hidden = f".{self._target.name}.{secrets.token_hex(4)}.writing"
        self._draft = None if _is_stream(path) else self._target.with_name(hidden)
        with self.errors():
            if self._target.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            flags = os.O_APPEND if self._draft is None else os.O_CREAT | os.O_EXCL
            descriptor = os.open(self._draft or path, os.O_WRONLY | flags, 0o666)
        self.stream = open(descriptor, "w", encoding="utf-8", errors="replace", newline="")  # noqa: SIM115

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise CommandFailed for an OSError in the block."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "DISK_FULL" if full else "OUTPUT_NOT_WRITABLE"
            hint = f"; {self.hint}" if self.hint else ""
            message = f"{self.path} cannot be written: {error.strerror}{hint}"
            raise CommandFailed(reason, message) from error

    def write(self, text: str) -> int:
        """Write to the file, as `csv.writer` calls it."""
        with self.errors():
            return self.stream.write(text)

    def complete(self) -> None:
        """Put the file in its place, also of an older one."""
        with self.errors():
            self.stream.close()
            if self._draft is not None:
                if self._target.exists():
                    self._draft.chmod(stat.S_IMODE(self._target.stat().st_mode))
                self._draft.replace(self._target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what is left in its buffer does not fit on the disk either
            self.stream.close()
        if self._draft is not None:
            self._draft.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    """Tell whether `path` is no file that could be replaced. Descriptors may be open for appending to a file."""
    if path.absolute().parent == Path("/dev") or path.parent.resolve() == _DESCRIPTORS.resolve():
        return True
    return path.exists() and not (path.is_file() or path.is_dir())
