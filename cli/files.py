"""Files of commands: what they read, and what they write, which appears when it is complete."""

import csv
import errno
import gzip
import io
import json
import os
import secrets
import stat
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
_NO_UNNAMED_FILES: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
"""How file systems and kernels without O_TMPFILE refuse it; of a missing folder the named file says so again."""
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


class Draft:
    """The contents of a file until they are complete; without `publish` nothing is left of them.

    1. They have no name yet (O_TMPFILE), so that nothing is left of a killed command either. On file systems without
       such files they have a hidden one beside the target, which `close` removes.
    2. A symbolic link stays, and what it points to is replaced. A file that is replaced keeps its permissions.
    3. A device, a pipe or an open descriptor such as /dev/stdout is not replaced but written to, at once.

    Attributes:
        descriptor: open for writing; its owner closes it.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; raises OSError."""
        self._target = Path(os.path.realpath(path))
        self._in_place = _is_stream(path)
        # Of this command alone: another one may write the same file.
        name = f".{self._target.name}.{secrets.token_hex(4)}.writing"
        self._scratch = self._target.with_name(name)
        self._is_named = False
        self.descriptor = self._open(path)

    def publish(self) -> None:
        """Put the contents, which were flushed, in their place; raises OSError."""
        if self._in_place:
            return
        if self._target.exists():
            os.fchmod(self.descriptor, stat.S_IMODE(self._target.stat().st_mode))
        if not self._is_named:
            _name(self.descriptor, self._scratch)
            self._is_named = True
        self._scratch.replace(self._target)

    def close(self) -> None:
        """Remove what was not published."""
        if self._is_named:
            self._scratch.unlink(missing_ok=True)

    def _open(self, path: Path) -> int:
        if self._in_place:
            return os.open(path, os.O_WRONLY | os.O_APPEND)
        if self._target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        try:
            return os.open(self._target.parent, os.O_RDWR | os.O_TMPFILE, 0o666)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
        descriptor = os.open(self._scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._is_named = True
        return descriptor


def _is_stream(path: Path) -> bool:
    """Tell whether `path` is no file that could be replaced. Descriptors may be open for appending to a file."""
    if path.absolute().parent == Path("/dev") or path.parent.resolve() == _DESCRIPTORS.resolve():
        return True
    return path.exists() and not (path.is_file() or path.is_dir())


def _name(descriptor: int, path: Path) -> None:
    """Give an unnamed file a name."""
    folder = os.open(_DESCRIPTORS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With a folder's descriptor `os.link` follows the link (linkat with AT_SYMLINK_FOLLOW).
        os.link(str(descriptor), path, src_dir_fd=folder)
    finally:
        os.close(folder)


class NewFile:
    """A text file that is written; without `complete` nothing is left of it when the block ends, see `Draft`.

    Attributes:
        path: its name once it is complete.

    Raises:
        CommandFailed: it cannot be written; the constructor raises it before anything was computed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._draft = Draft(path)
        except OSError as error:
            raise self.failed(error) from error
        self._file = open(  # noqa: SIM115  closed by `complete` or `__exit__`
            self._draft.descriptor, "w", encoding="utf-8", errors="replace", newline=""
        )

    @contextmanager
    def writing(self) -> Iterator[TextIO]:
        """Write to the file in the block."""
        try:
            yield self._file
        except OSError as error:
            raise self.failed(error) from error

    def complete(self) -> None:
        """Put the file in its place, also of an older one."""
        with self.writing() as file:
            file.flush()
            self._draft.publish()
            file.close()

    def failed(self, error: OSError) -> CommandFailed:
        """Return the error of the command when the file cannot be written."""
        return CommandFailed("FILE", f"{self.path} cannot be written: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what is left in its buffer does not fit on the disk either
            self._file.close()
        self._draft.close()


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
        """Write a line."""
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
    """Open the file at `path` for writing, if there is one; leave nothing of it unless it is completed."""
    if path is None:
        yield None
        return
    with OutFile(path) as file:
        yield file
