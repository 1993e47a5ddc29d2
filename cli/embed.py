"""`sluice embed`: the embeddings of a file of texts."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, BinaryIO, Final, cast

from typer import Argument, BadParameter, Option

from cli import options, output
from cli.commands import Group, wants_json
from cli.files import NewFile
from sluice.client import Embeddings
from sluice.errors import InputInvalid

WINDOW: Final = 2048
"""Texts that are in memory at a time."""
_NPY: Final = b"\x93NUMPY\x01\x00"
_Text = tuple[Any, str]
"""What names a text in the output, or None, and the text."""
_Write = Callable[[int, Sequence[_Text], Embeddings], None]
"""Writes a window of texts; the first has this index."""
_NPY_HEADER: Final = 118
"""Bytes of numpy's header behind its first ten, so that the numbers begin at 128; long enough for any count."""


def _settings(
    model: str = Option("", "--model", "-m", help="Embedding model.", metavar="NAME"),
    prompt_name: str = Option("", help='Name of a prompt, such as "query".', metavar="NAME"),
    dimensions: int = Option(0, help="Number of dimensions of each embedding; 0: all.", min=0),
    normalize: bool | None = Option(None, help="Scale to length 1.  [default: as the model says]"),
    truncate: bool = Option(False, "--truncate", help="Cut long texts instead of failing."),
    priority: options.Priority = "standard",
) -> dict[str, Any]:
    """Return the settings as arguments of `Client.embed`."""
    return locals()


def embed(
    *,
    file: str = Argument(
        ..., help='Texts or JSON objects, one a line; "-": stdin.', metavar="FILE"
    ),
    out: Path | None = Option(
        None, "--output", "-o", help=".npy for numpy, else JSON.", metavar="OUT"
    ),
    field: str = Option("text", help="Field of JSON objects with the text.", metavar="NAME"),
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
    began, count, tokens, served_by, empty = monotonic(), 0, 0, "", list[int]()
    with ExitStack() as stack:
        lines = sys.stdin.buffer if file == "-" else stack.enter_context(open(file, "rb"))
        write = stack.enter_context(_writing(out))
        texts = _texts(lines, field, empty)
        while window := list(islice(texts, WINDOW)):
            embeddings = client.embed([text for _, text in window], **settings)
            write(count, window, embeddings)
            count, tokens = count + len(window), tokens + embeddings.prompt_tokens
            served_by = embeddings.model
    took_s = monotonic() - began
    done = {
        "texts": count,
        "tokens": tokens,
        "model": served_by,
        "seconds": round(took_s, 3),
        "empty_lines": len(empty),
    }
    left_out = f", {len(empty)} empty lines left out" if empty else ""
    text = f"{count} texts, {tokens} tokens, {count / took_s:.1f} texts/s{left_out}"
    output.show(done, lambda: output.note(text))


def _texts(lines: Iterable[bytes], field: str, empty: list[int]) -> Iterator[_Text]:
    """Yield the texts of a file, of objects when its first line that is not empty is one; note lines that are `empty`.

    Raises:
        InputInvalid: A line is not UTF-8, or an object without the field.
    """
    objects: bool | None = None
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputInvalid(f"line {number} is not valid UTF-8") from None
        if not text.strip():
            empty.append(number)
            continue
        if objects is None:
            objects = text.lstrip().startswith("{")
        yield _of_object(text, number, field) if objects else (None, text)


def _of_object(line: str, number: int, field: str) -> _Text:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputInvalid(f"line {number} is not JSON: {error}") from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InputInvalid(f"line {number} has no text in {field!r}; --field names another field")
    return value.get("id", value.get("custom_id")), text


@contextmanager
def _writing(out: Path | None) -> Iterator[_Write]:
    if out is None:
        yield partial(_write_lines, sys.stdout.write)
        return
    with NewFile(out) as new:
        if out.suffix == ".npy":
            array = _Npy(new)
            yield array.write
            array.write_header()
        else:
            yield partial(_write_lines, new.write)
        new.complete()


def _write_lines(
    write: Callable[[str], int], first: int, window: Sequence[_Text], embeddings: Embeddings
) -> None:
    """Write a line of JSON for each text."""
    for at, ((name, _), vector) in enumerate(zip(window, embeddings.vectors, strict=True)):
        named = {} if name is None else {"id": name}
        line = {"index": first + at, **named, "tokens": embeddings.token_counts[at]}
        write(json.dumps({**line, "embedding": vector.tolist()}) + "\n")


class _Npy:
    """An array of numpy, float32; its header is written again when the count is known."""

    def __init__(self, new: NewFile) -> None:
        if not new.stream.seekable():
            raise InputInvalid(f"{new.path}: .npy needs a file; write JSON lines to a pipe")
        self._new, self._file = new, cast("BinaryIO", new.stream.buffer)
        self._rows = self._size = 0
        self.write_header()

    def write(self, first: int, window: Sequence[_Text], embeddings: Embeddings) -> None:
        with self._new.errors():
            for vector in embeddings.vectors:
                self._file.write(vector.tobytes())
        self._rows += len(embeddings.vectors)
        self._size = len(embeddings.vectors[0])

    def write_header(self) -> None:
        shape = f"({self._rows}, {self._size})"
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        with self._new.errors():
            self._file.seek(0)
            self._file.write(_NPY + _NPY_HEADER.to_bytes(2, "little"))
            self._file.write(header.ljust(_NPY_HEADER - 1).encode() + b"\n")
            self._file.seek(0, os.SEEK_END)
