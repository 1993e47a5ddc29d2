"""A file that a command writes: it appears, or replaces an older one, when it is complete."""

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TextIO

from cli.failure import CommandFailed


class NewFile:
    """A text file; without `complete` nothing is left of it when the block ends.

    Raises:
        CommandFailed: it cannot be written; the constructor raises it before anything was computed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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
        """Puts the file in its place."""
        with self.writing() as file:
            file.close()
            self._scratch.replace(self._path)

    def failed(self, error: OSError) -> CommandFailed:
        """The error of the command when the file cannot be written."""
        return CommandFailed("FILE", f"{self._path} cannot be written: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what is left in its buffer does not fit on the disk either
            self._file.close()
        self._scratch.unlink(missing_ok=True)
