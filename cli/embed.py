"""`sluice embed`: the embeddings of a file of texts."""

import json
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, BinaryIO, Final

from typer import Argument, BadParameter, Option

from cli import options, output
from cli.commands import Group, wants_json
from cli.files import Draft
from sluice.client import Embeddings
from sluice.errors import InputInvalid

WINDOW: Final = 2048
"""Texts that are in memory at a time."""
_NPY: Final = b"\x93NUMPY\x01\x00"
_NPY_HEADER: Final = 118
"""Bytes of numpy's header behind its first ten, so that the numbers begin at 128; long enough for any count."""


@dataclass(frozen=True)
class _Text:
    """A text, and what names it in the output."""

    text: str
    name: Any


def _settings(
    model: str = Option(
        "", "--model", "-m", help="Embedding model; needed if there are several.", metavar="NAME"
    ),
    prompt_name: str = Option(
        "", help='Of the model\'s prompt before each text, such as "query".', metavar="NAME"
    ),
    dimensions: int = Option(0, help="Number of dimensions of each embedding; 0: all.", min=0),
    normalize: bool | None = Option(
        None, help="Scale embeddings to length 1.  [default: as the model says]"
    ),
    truncate: bool = Option(
        False, "--truncate", help="Cut texts that are too long, instead of failing."
    ),
    priority: options.Priority = "standard",
) -> dict[str, Any]:
    """Return the settings as arguments of `Client.embed`."""
    return locals()


def embed(
    *,
    file: str = Argument(
        ..., help='Texts, one a line, or JSON objects, one a line; "-" reads stdin.', metavar="FILE"
    ),
    out: Path | None = Option(
        None,
        "--output",
        "-o",
        help="Where to write: .npy for an array of numpy, else JSON lines.  [default: stdout]",
        metavar="OUT",
    ),
    field: str = Option(
        "text", help="The field of JSON objects that holds the text.", metavar="NAME"
    ),
    settings: Annotated[dict[str, Any], Group(_settings)],
    client: options.TenantClient,
) -> None:
    """Embed the texts of a file, in their order.

    A JSON line has index, id (where the object had one), tokens and embedding. Empty lines are skipped. A file appears
    under its name when it is complete. With --json prints one object at the end: texts, tokens, model, seconds,
    empty_lines.
    """
    if wants_json() and out is None:
        raise BadParameter("required; name the file for the embeddings", param_hint="--output")
    began, count, tokens, served_by = monotonic(), 0, 0, ""
    with _opened(file) as lines, _writer(out) as write:
        read = _Lines(lines, field)
        texts = iter(read)
        while window := list(islice(texts, WINDOW)):
            embeddings = client.embed([one.text for one in window], **settings)
            write(count, window, embeddings)
            count, tokens = count + len(window), tokens + embeddings.prompt_tokens
            served_by = embeddings.model
    took_s = monotonic() - began
    done = {
        "texts": count,
        "tokens": tokens,
        "model": served_by,
        "seconds": round(took_s, 3),
        "empty_lines": read.empty,
    }
    left_out = f", {read.empty} empty lines left out" if read.empty else ""
    text = f"{count} texts, {tokens} tokens, {count / took_s:.1f} texts/s{left_out}"
    output.show(done, lambda: output.note(text))


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    with open(file, "rb") as opened:
        yield opened


class _Lines:
    """The texts of a file; objects when the first line that is not empty is one.

    Attributes:
        empty: lines that were left out.
    """

    def __init__(self, lines: BinaryIO, field: str) -> None:
        self.empty = 0
        self._lines, self._field = lines, field

    def __iter__(self) -> Iterator[_Text]:
        """Yield the texts.

        Raises:
            InputInvalid: A line is not UTF-8, or an object without the field.
        """
        objects: bool | None = None
        for number, line in enumerate(self._lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise InputInvalid(f"line {number} is not valid UTF-8") from None
            if not text.strip():
                self.empty += 1
                continue
            if objects is None:
                objects = text.lstrip().startswith("{")
            yield _of_object(text, number, self._field) if objects else _Text(text, None)


def _of_object(line: str, number: int, field: str) -> _Text:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputInvalid(f"line {number} is not JSON: {error}") from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InputInvalid(f"line {number} has no text in {field!r}; --field names another field")
    return _Text(text, value.get("id", value.get("custom_id")))


class _JsonLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __call__(self, first: int, window: Sequence[_Text], found: Embeddings) -> None:
        for at, (one, vector) in enumerate(zip(window, found.vectors, strict=True)):
            named = {} if one.name is None else {"id": one.name}
            line = {"index": first + at, **named, "tokens": found.token_counts[at]}
            line["embedding"] = vector.tolist()
            self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Do nothing: every line was written when it came."""


class _Npy:
    """An array of numpy, float32; its header is written again when the count is known."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rows = self._size = 0
        self.close()

    def __call__(self, first: int, window: Sequence[_Text], found: Embeddings) -> None:
        self._file.seek(0, os.SEEK_END)
        for vector in found.vectors:
            self._file.write(_little_endian(vector))
        self._rows += len(found.vectors)
        self._size = len(found.vectors[0])

    def close(self) -> None:
        shape = f"({self._rows}, {self._size})"
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        self._file.seek(0)
        self._file.write(_NPY + _NPY_HEADER.to_bytes(2, "little"))
        self._file.write(header.ljust(_NPY_HEADER - 1).encode() + b"\n")


def _little_endian(vector: "array[float]") -> bytes:
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return vector.tobytes()


@contextmanager
def _writer(out: Path | None) -> Iterator[_JsonLines | _Npy]:
    if out is None:
        yield _JsonLines(sys.stdout.buffer)
        return
    try:
        draft = Draft(out)
    except OSError as error:
        raise InputInvalid(f"{out}: {error.strerror}") from error
    try:
        with open(draft.descriptor, "wb") as file:
            if out.suffix == ".npy" and not file.seekable():
                raise InputInvalid(f"{out}: .npy needs a file; write JSON lines to a pipe")
            writer = _Npy(file) if out.suffix == ".npy" else _JsonLines(file)
            yield writer
            writer.close()
            file.flush()
            draft.publish()
    finally:
        draft.close()
