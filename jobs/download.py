"""Downloads of whole files over several connections, if one breaks.

1. A connection that ends before the announced length, or within a chunk, is broken.
2. The rest is requested with `Range` and `If-Range`: the rest of the same version, or all of another one.
3. Without a validator (a strong ETag, or a Last-Modified that is old enough) two versions cannot be
   told apart, so the download fails, and the caller starts again.
"""

import http.client
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from email.utils import parsedate_to_datetime
from typing import Final

from sluice.errors import InvalidRequest, TransportUnavailable

PIECE_BYTES: Final = 256 * 1024
"""Bytes that are yielded at a time."""
FAILURES_MAX: Final = 4
"""Connections in a row that may bring nothing."""
RESUMES_MAX: Final = 100
"""Connections that may break in a whole download."""
FIRST_WAIT_S: Final = 0.5
"""Wait before the download continues, in seconds; doubles with each connection that brings nothing."""
_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_PASSING: Final = frozenset({408, 425, 429})

OpenUrl = Callable[[Mapping[str, str]], AbstractContextManager[http.client.HTTPResponse]]


class _Changed(TransportUnavailable):
    """The URL leads to another version by now."""


class Download:
    """One download.

    Args:
        open: sends a GET with these headers; raises TransportUnavailable when the connection breaks, also
            within its block.
        name: name of the server, for messages.
        field: field that has the URL, for messages.
        wait: waits for this many seconds.
    """

    def __init__(
        self, open: OpenUrl, name: str, field: str, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._open = open
        self._name, self._field = name, field
        self._wait = wait
        self._position = 0
        self._size: int | None = None
        self._validator = ""

    def pieces(self) -> Generator[bytes]:
        """Yield all bytes.

        Raises:
            InvalidRequest: the server refuses them.
            TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
        """
        failures = resumes = 0
        while True:
            before = self._position
            try:
                yield from self._connection()
            except TransportUnavailable as error:
                # A connection that brought bytes starts the count of failures anew.
                failures = 1 if self._position > before else failures + 1
                resumes += 1
                worn_out = failures > FAILURES_MAX or resumes > RESUMES_MAX
                if worn_out or not self._may_resume(error):
                    raise
                self._wait(FIRST_WAIT_S * 2 ** (failures - 1))
            else:
                return

    def _may_resume(self, error: TransportUnavailable) -> bool:
        return self._position > 0 and self._validator != "" and not isinstance(error, _Changed)

    def _connection(self) -> Generator[bytes]:
        headers = {"Accept-Encoding": "identity"}
        if self._position:
            headers |= {"Range": f"bytes={self._position}-", "If-Range": self._validator}
        with self._open(headers) as response:
            total = self._resumed(response) if self._position else self._begun(response)
            for piece in _pieces(response):
                fresh = piece[total:]
                total = max(0, total - len(piece))
                self._position += len(fresh)
                if fresh:
                    yield fresh
        if total or (self._size is not None and self._position < self._size):
            raise self._broken(f"ended after {self._position} of {self._size} bytes")

    def _begun(self, response: http.client.HTTPResponse) -> int:
        """Store what the first response says; return how many of its bytes are known: none."""
        if response.status != 200:
            raise self._refused(response.status)
        self._size = _size(response)
        self._validator = _validator(response)
        return 0

    def _resumed(self, response: http.client.HTTPResponse) -> int:
        """Return how many bytes of a later response are known: none, or all so far if it has the whole."""
        if response.status == 206:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            begin, size = match.groups() if match else ("", "")
            if begin != str(self._position) or size not in ("*", str(self._size or size)):
                raise _Changed(f"{self._name}: gave another range than it was asked for")
            self._size = int(size) if size != "*" else self._size
            return 0
        if response.status == 200 and _validator(response) == self._validator:
            return self._position
        if response.status in (200, 412, 416):
            raise _Changed(f"{self._name}: the file changed while it was read")
        raise self._refused(response.status)

    def _refused(self, status: int) -> Exception:
        if status >= 500 or status in _PASSING:
            return self._broken(f"says {status}")
        return InvalidRequest.of(self._field, f"{self._name} says {status}")

    def _broken(self, why: str) -> TransportUnavailable:
        return TransportUnavailable(f"{self._name}: {why}", retry_after_s=1.0)


def _pieces(response: http.client.HTTPResponse) -> Generator[bytes]:
    """Yield the pieces of a body; what came before a connection broke is not lost."""
    pending = bytearray()
    broken: Exception | None = None
    try:
        while piece := response.read1(PIECE_BYTES):
            pending += piece
            if len(pending) >= PIECE_BYTES:
                yield bytes(pending)
                pending.clear()
    except (OSError, http.client.HTTPException) as error:
        broken = error
    if pending:
        yield bytes(pending)
    if broken is not None:
        raise broken


def _size(response: http.client.HTTPResponse) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _validator(response: http.client.HTTPResponse) -> str:
    """Return what identifies the version of a response; empty: nothing does."""
    headers = response.headers
    tag = headers.get("ETag", "")
    if tag:
        return "" if tag.startswith("W/") else tag
    modified = headers.get("Last-Modified", "")
    try:
        age = parsedate_to_datetime(headers.get("Date", "")) - parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return ""
    # Last-Modified has a resolution of a second, in which a file may be written twice.
    return modified if age.total_seconds() > 1 else ""
