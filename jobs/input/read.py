"""The items of an input: which format it has, and what each of its lines is.

Memory holds one line and the hashes of the ids (`SeenIds`), whatever the size of the input; Parquet needs a temporary
file, and of that one row group of the columns in use.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO, Final

from jobs.input import stream, tables
from jobs.input.seen import SeenIds
from jobs.input.template import Template
from jobs.items import BadLine, Item, Request
from sluice.errors import InputInvalid
from sluice.openai import embeddings, requests
from sluice.openai.fields import BadField
from sluice.v1 import inference_pb2 as pb

LINE_BYTES_MAX: Final = 1 << 20
"""As much as a gateway takes of one request by default (`gateway.max_message_bytes`)."""
ID_CHARS_MAX: Final = 256
ID_FIELDS: Final = ("custom_id", "id")
DUPLICATE: Final = "DUPLICATE_ID"

_SPACE: Final = b" \t\r\n\xef\xbb\xbf"
_COMPRESSED: Final = (".gz", ".zst", ".zstd")

_OfLine = Callable[[int, bytes], Item | BadLine]


class Format(StrEnum):
    """How an input is written."""

    AUTO = "auto"
    """JSONL or Parquet, as its first bytes say."""
    JSONL = "jsonl"
    """Objects, one a line: OpenAI's batch format, the plain form, or rows of a template; also mixed."""
    CSV = "csv"
    """A header, then rows of a template."""
    PARQUET = "parquet"
    """Rows of a template."""
    TEXT = "text"
    """Each line is a prompt."""

    @classmethod
    def of_name(cls, name: str) -> "Format":
        """What the ending of a file's name says; AUTO where it says nothing."""
        for ending in _COMPRESSED:
            name = name.removesuffix(ending)
        endings = {"jsonl": cls.JSONL, "ndjson": cls.JSONL, "csv": cls.CSV, "txt": cls.TEXT}
        return (endings | {"parquet": cls.PARQUET}).get(name.rpartition(".")[2].lower(), cls.AUTO)


def read_items(
    chunks: Iterator[bytes],
    format: Format = Format.AUTO,
    template: Template | None = None,
    defaults: pb.GenerateRequest | None = None,
    *,
    id_field: str = "",
    line_bytes_max: int = LINE_BYTES_MAX,
) -> Iterator[Item | BadLine]:
    """The items of an input and the lines that are none, in order, read as they are taken.

    Args:
        chunks: the bytes of the input in pieces of any length, plain or compressed with gzip or zstd.
        format: how it is written.
        template: makes the prompts out of rows. Tables without one have a column "prompt".
        defaults: what holds where a line does not say otherwise; a chat of one system message is put before each
            conversation.
        id_field: names an item; empty: "custom_id" or "id", without either the number of the line does.
        line_bytes_max: a longer line is a bad one.

    Raises:
        InputInvalid: it cannot be read on: an unknown format, a missing column, damaged bytes, nothing in it. What
            `chunks` raises passes through.
    """
    opened = stream.opened(chunks)
    reader = _Reader(
        opened,
        template,
        defaults or pb.GenerateRequest(),
        (id_field,) if id_field else ID_FIELDS,
        line_bytes_max,
    )
    seen, line = SeenIds(), 0
    try:
        for one in reader.entries(format):
            line = one.line
            if isinstance(one, BadLine) or seen.add(one.custom_id):
                yield one
            else:
                reason = f"custom_id: {one.custom_id!r} is that of an earlier line"
                yield BadLine(line, one.custom_id, reason, DUPLICATE)
    except stream.damaged_errors(opened) as error:
        raise InputInvalid(f"the compressed input is damaged after line {line}: {error}") from error
    if not line:
        raise InputInvalid("the input is empty: it has no items")


@dataclass(frozen=True, slots=True)
class _Reader:
    opened: BinaryIO
    template: Template | None
    defaults: pb.GenerateRequest
    id_fields: tuple[str, ...]
    line_bytes_max: int

    def entries(self, format: Format) -> Iterator[Item | BadLine]:
        match _detected(self.opened) if format is Format.AUTO else format:
            case Format.CSV:
                return self._of_rows(
                    tables.csv_rows(self.opened, self._of_table, self.line_bytes_max)
                )
            case Format.PARQUET:
                return self._of_rows(
                    tables.parquet_rows(self.opened, self._of_table, self.id_fields)
                )
            case Format.TEXT:
                return self._of_lines(self._of_text)
            case _:
                return self._of_lines(self._of_json)

    @property
    def _of_table(self) -> Template:
        return self.template or tables.PROMPT

    def _of_rows(self, rows: Iterator[tables.Row]) -> Iterator[Item | BadLine]:
        for number, row in rows:
            if isinstance(row, str):
                yield BadLine(number, None, row)
            else:
                yield self._item(number, row, self._of_table)

    def _of_lines(self, of_line: _OfLine) -> Iterator[Item | BadLine]:
        for number, line in stream.lines(self.opened, self.line_bytes_max):
            if line is None:
                yield BadLine(number, None, f"is longer than {self.line_bytes_max} bytes")
            elif line.strip(_SPACE):
                yield of_line(number, line)

    def _of_text(self, number: int, line: bytes) -> Item | BadLine:
        row = {"prompt": line.decode("utf-8", "surrogateescape").strip()}
        return self._item(number, row, tables.PROMPT)

    def _of_json(self, number: int, line: bytes) -> Item | BadLine:
        try:
            value = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
        except UnicodeDecodeError:
            return BadLine(number, None, "is not valid UTF-8")
        except (ValueError, RecursionError) as error:
            return BadLine(number, None, f"is not JSON: {error}")
        if not isinstance(value, dict):
            return BadLine(number, None, "is no JSON object")
        return self._item(number, value, self.template)

    def _item(
        self, number: int, row: Mapping[str, Any], template: Template | None
    ) -> Item | BadLine:
        custom_id = None
        request: Request
        try:
            custom_id, rest = self._id_of(row, number)
            if template is not None:
                request = requests.with_prompt(_rendered(template, row), self.defaults)
            elif "body" in rest or "url" in rest:
                request = _of_openai(rest, self.defaults)
                return Item(custom_id, number, request, "POST", rest["url"])
            else:
                request = requests.request_of_plain(rest, self.defaults)
        except BadField as error:
            return BadLine(number, custom_id, str(error))
        return Item(custom_id, number, request)

    def _id_of(self, row: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
        """The id of a row, without one its number, and what else is in the row."""
        rest = dict(row)
        named = [value for key in self.id_fields if (value := rest.pop(key, None)) is not None]
        given = named[0] if named else number
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise BadField("custom_id: is neither text nor a whole number")
        custom_id = str(given)
        if not 0 < len(custom_id) <= ID_CHARS_MAX or not custom_id.isprintable():
            raise BadField(f"custom_id: is not 1 to {ID_CHARS_MAX} printable characters")
        return custom_id, rest


def _of_openai(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> Request:
    if line.get("url") == embeddings.EMBEDDINGS:
        return embeddings.request_of_line(line, defaults)
    return requests.request_of_openai(line, defaults)


def _detected(opened: BinaryIO) -> Format:
    head: bytes = opened.peek(64)[:64]  # type: ignore[attr-defined]
    if head.startswith(b"PAR1"):
        return Format.PARQUET
    first = head.lstrip(_SPACE)[:1]
    if first in (b"{", b""):
        return Format.JSONL
    if first == b"[":
        raise InputInvalid("the input is one JSON array: write each of its objects on a line")
    raise InputInvalid("the input is not JSONL: it does not begin with '{'; of CSV say the format")


def _rendered(template: Template, row: Mapping[str, Any]) -> str:
    for column in template.columns:
        if row.get(column) is None:
            raise BadField(f"{column}: the template needs it, and it is missing or null")
    return template.render(row)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
