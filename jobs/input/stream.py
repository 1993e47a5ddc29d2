"""Bytes of an input as one decompressed binary stream, and its lines, in bounded memory."""

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, Final

from backports import zstd

from jobs.threads import ReadingStopped, StopSignal
from sluice.errors import InputInvalid

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_HEAD_BYTES: Final = 64
_BUFFER_BYTES: Final = 64 * 1024
_WINDOW_LOG_MAX: Final = 27
"""Largest zstd window: 128 MiB, which `zstd --long` makes."""

GROWTH_MAX: Final = 256
"""How many times its compressed bytes an input may have, beside `GROWTH_BYTES`; prompts compress 20
times at best."""
GROWTH_BYTES: Final = 64 * 1024 * 1024
"""Decompressed bytes that are allowed in any case."""
BLANK_LINES_MAX: Final = 1000
"""Empty lines in a row."""

DAMAGED: Final = (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError)
"""Errors of reading damaged or truncated compressed bytes."""


def opened(chunks: Iterator[bytes], stop: StopSignal | None = None) -> BinaryIO:
    """Return the bytes as a stream; gzip and zstd, detected by their first bytes, are decompressed.

    Reading raises InputInvalid if compressed bytes grow too much, one of `DAMAGED` if they are damaged, and
    ReadingStopped after `stop`.
    """
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= _HEAD_BYTES:
            break
    source = _ChunkReader(chain((head,), chunks), stop or StopSignal())
    raw = io.BufferedReader(source, _BUFFER_BYTES)
    if head.startswith(_GZIP):
        grown: Any = gzip.GzipFile(fileobj=raw)
    elif head.startswith(_ZSTD):
        # Without a limit, a frame could demand a window of any size.
        options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG_MAX}
        grown = zstd.ZstdFile(raw, options=options)
    else:
        return raw
    return io.BufferedReader(_BoundedReader(grown, source), _BUFFER_BYTES)


def lines(stream: BinaryIO, bytes_max: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines with their numbers from 1; None instead of one of more than `bytes_max` bytes.

    Raises:
        InputInvalid: too many lines in a row are empty.
    """
    number = blank = 0
    while line := stream.readline(bytes_max + 1):
        number += 1
        blank = 0 if len(line) > 2 or line.strip() else blank + 1
        if blank > BLANK_LINES_MAX:
            raise InputInvalid(f"line {number}: over {BLANK_LINES_MAX} consecutive empty lines")
        if len(line) <= bytes_max:
            yield number, line
            continue
        yield number, None  # A caller that stops here does not read the rest of the line.
        while line and not line.endswith(b"\n"):
            line = stream.readline(_BUFFER_BYTES)


class _ChunkReader(io.RawIOBase):
    """Pieces of any length as a raw stream."""

    def __init__(self, chunks: Iterator[bytes], stop: StopSignal) -> None:
        self.read_bytes = 0
        self.stop = stop
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # type: ignore[override]
        if self.stop.done():
            raise ReadingStopped
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self.read_bytes += len(chunk)
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


class _BoundedReader(io.RawIOBase):
    """Decompressed bytes, as long as they are not far more than the bytes of `source`."""

    def __init__(self, stream: Any, source: _ChunkReader) -> None:
        self._stream, self._source = stream, source
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # type: ignore[override]
        if self._source.stop.done():
            raise ReadingStopped
        size: int = self._stream.readinto(buffer)
        self._size += size
        if self._size > GROWTH_BYTES + GROWTH_MAX * self._source.read_bytes:
            raise InputInvalid(
                f"the compressed input expands to over {GROWTH_MAX} times its size; send it uncompressed"
            )
        return size
