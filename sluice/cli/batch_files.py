"""Files of `sluice batch`: the input as it is uploaded, and the output, which appears when it is complete."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sluice.cli.failure import CommandFailed

PIECE_BYTES: Final = 256 * 1024

_JSONL: Final = (".jsonl", ".ndjson")
_HEAD_BYTES: Final = 4096


def check_input(path: Path) -> None:
    """Looks at the beginning of a file before it is sent.

    Raises:
        CommandFailed: it is not there, cannot be read, is empty, or is no JSONL though its name says so.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise CommandFailed("INPUT_EMPTY", f"{path} is empty")
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if path.suffix.lower() in _JSONL and first not in (b"{", b""):
        raise CommandFailed(
            "NOT_JSONL", f"{path} is not JSONL: its first line does not begin with '{{'"
        )


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of the file.

    Raises:
        CommandFailed: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise unreadable(path, error) from error


def pieces_of(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces as a file is sent."""
    return (data[begin : begin + PIECE_BYTES] for begin in range(0, len(data), PIECE_BYTES))


def unreadable(path: Path, error: OSError) -> CommandFailed:
    """Of a file that cannot be read."""
    reason = "NO_SUCH_FILE" if isinstance(error, FileNotFoundError) else "FILE"
    return CommandFailed(reason, f"{path} cannot be read: {error.strerror}")


class OutFile:
    """Lines of JSON in a file that appears, or replaces an older one, when it is complete.

    Args:
        hint: what to do when it cannot be written to the end.

    Raises:
        CommandFailed: it cannot be written; the constructor raises it before anything was computed.
    """

    def __init__(self, path: Path, hint: str = "") -> None:
        self._path = path
        self._scratch = path.with_name(f".{path.name}.writing")
        self.hint = hint
        self.lines = 0
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            self._file = self._scratch.open("w", encoding="utf-8", errors="replace")
        except OSError as error:
            raise self._failed(error) from error

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line."""
        try:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise self._failed(error) from error
        self.lines += 1

    def complete(self) -> None:
        """Puts the file in its place."""
        try:
            self._file.close()
            self._scratch.replace(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Removes what was not completed."""
        with suppress(OSError):  # what is left in its buffer does not fit on the disk either
            self._file.close()
        self._scratch.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> CommandFailed:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "DISK_FULL" if full else "OUTPUT_NOT_WRITABLE"
        hint = f"; {self.hint}" if self.hint else ""
        return CommandFailed(reason, f"{self._path} cannot be written: {error.strerror}{hint}")


@contextmanager
def opened(path: Path | None) -> Iterator[OutFile | None]:
    """The file at ``path``, if there is one to write; unless it was completed nothing is left of it."""
    if path is None:
        yield None
        return
    file = OutFile(path)
    try:
        yield file
    finally:
        file.close()
