"""Files of `sluice batch`: the input as it is uploaded, and the output, which appears when it is complete."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from cli.failure import CommandFailed
from cli.new_file import NewFile

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
