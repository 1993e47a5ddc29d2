"""Downloads of whole files over several connections, if one breaks.

1. A connection that ends before the announced length, or within a chunk, is broken.
2. The rest is requested with `Range` and `If-Range`, so that it is that of the same version.
3. Without a strong ETag two versions cannot be told apart. Then, or if the version changed, the
   download fails, and the caller starts again.
"""

import http.client
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Final

from sluice.errors import InvalidRequest, TransportUnavailable

PIECE_BYTES: Final = 256 * 1024
"""Maximum bytes that are yielded at a time."""
FAILURES_MAX: Final = 4
"""Connections in a row that may bring nothing."""
FIRST_WAIT_S: Final = 0.5
"""Wait before the download continues, in seconds; doubles with each connection that brings nothing."""
_PASSING: Final = frozenset({408, 425, 429})

OpenUrl = Callable[[Mapping[str, str]], AbstractContextManager[http.client.HTTPResponse]]


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
        self._version = ""

    def pieces(self) -> Generator[bytes]:
        """Yield all bytes.

        Raises:
            InvalidRequest: the server refuses them.
            TransportUnavailable: it cannot be reached, or the bytes do not come to their end.
        """
        failures = 0
        while True:
            before = self._position
            try:
                yield from self._connection()
            except TransportUnavailable:
                # A connection that brought bytes starts the count of failures anew.
                failures = 1 if self._position > before else failures + 1
                if failures > FAILURES_MAX or not (self._position and self._version):
                    raise
                self._wait(FIRST_WAIT_S * 2 ** (failures - 1))
            else:
                return

    def _connection(self) -> Generator[bytes]:
        headers = {"Accept-Encoding": "identity"}
        if self._position:
            headers |= {"Range": f"bytes={self._position}-", "If-Range": self._version}
        with self._open(headers) as response:
            if self._position:
                self._check_rest(response)
            elif response.status != 200:
                raise self._refused(response.status)
            else:
                tag = response.headers.get("ETag", "")
                self._version = "" if tag.startswith("W/") else tag
                self._size = response.length
            while piece := response.read1(PIECE_BYTES):
                self._position += len(piece)
                yield piece
        if self._size is not None and self._position < self._size:
            raise self._broken(f"ended after {self._position} of {self._size} bytes")

    def _check_rest(self, response: http.client.HTTPResponse) -> None:
        """Check that a later response has the rest of the file."""
        given = response.headers.get("Content-Range", "")
        size = r"\d+" if self._size is None else self._size
        if response.status == 206 and re.fullmatch(
            rf"bytes {self._position}-\d+/({size}|\*)", given
        ):
            return
        if response.status in (200, 206, 412, 416):
            self._version = ""
            raise self._broken("the file changed while it was read")
        raise self._refused(response.status)

    def _refused(self, status: int) -> Exception:
        if status >= 500 or status in _PASSING:
            return self._broken(f"says {status}")
        return InvalidRequest.of(self._field, f"{self._name} says {status}")

    def _broken(self, why: str) -> TransportUnavailable:
        return TransportUnavailable(f"{self._name}: {why}", retry_after_s=1.0)
