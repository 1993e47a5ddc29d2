"""Items of an input: its format, and what each of its lines is.

Memory holds one line, whatever the size of the input; hashes of ids are in a temporary
file. Parquet needs another file, and one row group of the columns in use.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import Any, BinaryIO, Final

from jobs.answers import temporary_table
from jobs.input import stream, tables
from jobs.input.template import Template
from jobs.items import Item, Request, bad_line
from jobs.threads import StopSignal
from sluice.errors import InputInvalid
from sluice.openai import embeddings, requests
from sluice.openai.fields import BadField
from sluice.v1 import inference_pb2 as pb

LINE_BYTES_MAX: Final = 1 << 20
"""Longest line, in bytes: the default message limit of a gateway (`gateway.max_message_bytes`)."""
ID_CHARS_MAX: Final = 256
"""Longest id of an item."""
ID_FIELDS: Final = ("custom_id", "id")
"""Fields that name an item, if the job names none."""
DUPLICATE: Final = "DUPLICATE_ID"

_COMPRESSED: Final = (".gz", ".zst", ".zstd")


class Format(StrEnum):
    """Format of an input."""

    AUTO = "auto"
    """JSONL or Parquet, by its first bytes."""
    JSONL = "jsonl"
    """Objects, one per line: OpenAI's batch format, the plain form, or rows of a template; also
    mixed."""
    CSV = "csv"
    """A header, then rows of a template."""
    PARQUET = "parquet"
    """Rows of a template."""
    TEXT = "text"
    """Each line is a prompt."""

    @classmethod
    def of_name(cls, name: str) -> "Format":
        """Return the format of a file name's ending; AUTO if it is unknown."""
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
    skipped: int = 0,
    stop: StopSignal | None = None,
) -> Iterator[Item]:
    """Yield the items of an input, bad lines among them, in order, read as they are consumed.

    Args:
        chunks: bytes of the input in pieces of any length, plain or compressed with gzip or zstd.
        format: format of the input.
        template: makes prompts of rows. Tables without one have a column "prompt".
        defaults: values for what a line leaves out; a chat of one system message goes before each conversation.
        id_field: names an item; empty: "custom_id" or "id", or else the number of the line.
        line_bytes_max: a longer line is a bad one.
        skipped: number of first lines of which only the ids are read, to detect later duplicates.
        stop: ends reading with `ReadingStopped`.

    Raises:
        InputInvalid: it cannot be read on: an unknown format, a missing column, damaged bytes, no items.
            Errors of `chunks` pass through.
    """
    stop = stop or StopSignal()
    opened = stream.opened(chunks, stop)
    parser = ItemParser(defaults, id_field, skipped)
    of_table, number = template or tables.PROMPT, 0
    try:
        match _detected(opened) if format is Format.AUTO else format:
            case Format.CSV:
                rows, template = tables.csv_rows(opened, of_table, line_bytes_max), of_table
            case Format.PARQUET:
                ids = parser.id_fields
                rows, template = tables.parquet_rows(opened, of_table, ids, stop), of_table
            case Format.TEXT:
                rows, template = tables.text_rows(opened, line_bytes_max), tables.PROMPT
            case _:
                rows = tables.json_rows(opened, line_bytes_max)
        for number, row in rows:
            if (line := parser.parse(number, row, template)) is not None:
                yield line
    except stream.DAMAGED as error:
        raise InputInvalid(
            f"the compressed input is damaged after line {number}; send it again"
        ) from error
    if not number:
        raise InputInvalid("the input is empty; send at least one item")


class ItemParser:
    """Parses the rows of one input, one after the other. Arguments as those of `read_items`.

    Hashes of 8 bytes of all ids are in a file on disk, so that memory does not grow with the input.
    One of a million ids is mistaken for another with a probability of 3e-8.
    """

    def __init__(
        self,
        defaults: pb.GenerateRequest | None,
        id_field: str = "",
        skipped: int = 0,
    ) -> None:
        self._defaults = defaults or pb.GenerateRequest()
        self.id_fields = (id_field,) if id_field else ID_FIELDS
        self._skipped = skipped
        self._seen = temporary_table("hash BLOB PRIMARY KEY")

    def parse(self, number: int, row: tables.Row, template: Template | None) -> Item | None:
        """Return the item of a row, a bad line if it is none or its id came before; None if it is skipped."""
        custom_id, skips = "", self._skipped > 0
        self._skipped -= skips
        try:
            if isinstance(row, str):
                raise BadField(row)
            custom_id, rest = self._id_of(row, number)
            digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            added = self._seen.execute("INSERT OR IGNORE INTO kept VALUES (?)", (digest,))
            if skips:
                return None
            if not added.rowcount:
                reason = f"custom_id: {custom_id!r} is that of an earlier line"
                return bad_line(number, custom_id, reason, DUPLICATE)
            request = self._request(rest, row, template)
        except BadField as error:
            return None if skips else bad_line(number, custom_id, str(error))
        return Item(custom_id, number, request, "" if template else rest.get("url", ""))

    def _request(
        self, rest: dict[str, Any], row: Mapping[str, Any], template: Template | None
    ) -> Request:
        """Return the request of a row; `rest` has its fields without the id."""
        defaults = self._defaults
        if template is not None:
            return requests.request_of_plain({"prompt": template.render(row)}, defaults)
        if rest.get("url") == embeddings.EMBEDDINGS:
            return embeddings.request_of_line(rest, defaults)
        if "body" in rest or "url" in rest:
            return requests.request_of_openai(rest, defaults)
        return requests.request_of_plain(rest, defaults)

    def _id_of(self, row: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
        """Return the id of a row, without one its number, and the other fields."""
        rest = dict(row)
        ids = [value for key in self.id_fields if (value := rest.pop(key, None)) is not None]
        custom = ids[0] if ids else number
        if not isinstance(custom, str | int) or isinstance(custom, bool):
            raise BadField("custom_id: is neither text nor a whole number")
        custom_id = str(custom)
        if not 0 < len(custom_id) <= ID_CHARS_MAX or not custom_id.isprintable():
            raise BadField(f"custom_id: is not 1 to {ID_CHARS_MAX} printable characters")
        return custom_id, rest


def _detected(opened: BinaryIO) -> Format:
    head: bytes = opened.peek(64)[:64]  # type: ignore[attr-defined]
    if head.startswith(b"PAR1"):
        return Format.PARQUET
    first = head.lstrip(tables.SPACE)[:1]
    if first in (b"{", b""):
        return Format.JSONL
    if first == b"[":
        raise InputInvalid("the input is a JSON array; write one object per line")
    raise InputInvalid(
        "the input is not JSONL: it does not start with '{'; for CSV, name the format"
    )
