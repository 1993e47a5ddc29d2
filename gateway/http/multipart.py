"""Read a multipart form with one file as it arrives: the bytes of the file are passed on and never stored.

python-multipart parses the stream; `FileForm` adds bounds on the other fields, which it keeps in memory.
"""

from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from sluice.errors import InvalidRequest

FIELD_BYTES: Final = 4096
"""Most bytes of all fields together that are not the file."""
PARTS_MAX: Final = 64
"""Most parts of a form."""


class FileForm:
    """The form of an upload.

    Attributes:
        name: Name of the file; empty until its part has begun.
        has_file: Whether the part of the file has begun.
    """

    def __init__(self, content_type: str) -> None:
        """Prepare to read a form; raise InvalidRequest if `content_type` is not that of one."""
        kind, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest.of("content-type", "must be multipart/form-data with a boundary")
        self.name = ""
        self.has_file = False
        self._header, self._disposition = bytearray(), bytearray()
        self._file = self._part = bytearray()
        self._fields: dict[str, bytearray] = {}
        self._free_bytes, self._parts = FIELD_BYTES, 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_begin": self._header.clear,
                    "on_header_field": lambda data, start, end: self._header.extend(
                        data[start:end]
                    ),
                    "on_header_value": self._take_header_value,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                },
            )
        except FormParserError:
            raise InvalidRequest.of(
                "content-type", "has no usable boundary; send another one"
            ) from None

    @property
    def fields(self) -> dict[str, str]:
        """The fields that are not the file, as text."""
        return {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}

    def feed(self, data: bytes) -> bytes:
        """Read the next bytes of the body; return those of the file.

        Raises:
            InvalidRequest: The body is not a form, or exceeds a bound.
        """
        try:
            self._parser.write(data)
        except FormParserError:
            raise InvalidRequest(
                "the body is not a multipart form with the boundary in content-type"
            ) from None
        piece = bytes(self._file)
        self._file.clear()
        return piece

    def end(self) -> None:
        """Check that the form is complete.

        Raises:
            InvalidRequest: It is not, or has no file.
        """
        if self._parser.state != MultipartState.END:
            raise InvalidRequest("the multipart form is incomplete")
        if not self.has_file:
            raise InvalidRequest.of("file", "is required, with a filename")

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise InvalidRequest(f"the form has over {PARTS_MAX} parts; send fewer")
        self._disposition.clear()

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _end_headers(self) -> None:
        _, parameters = parse_options_header(bytes(self._disposition))
        self._field = parameters.get(b"name", b"").decode("utf-8", "replace")
        # A field named file without a filename is text, as in any form.
        if self._field != "file" or b"filename" not in parameters:
            self._part = self._fields[self._field] = bytearray()
        elif self.has_file:
            raise InvalidRequest.of("file", "is there twice; send one")
        else:
            self.has_file, self._part = True, self._file
            self.name = parameters[b"filename"].decode("utf-8", "replace")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._part += data[start:end]
        if self._part is not self._file:
            self._free_bytes -= end - start
            if self._free_bytes < 0:
                raise InvalidRequest.of(self._field, f"the fields have over {FIELD_BYTES} bytes")
