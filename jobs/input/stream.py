"""Bytes of an input as one binary stream, decompressed, and its lines. Memory is bounded whatever the input holds."""

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, Final

from jobs.threads import Stop, Stopped
from sluice.errors import InputInvalid

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_HEAD_BYTES: Final = 64
_BUFFER_BYTES: Final = 64 * 1024
_WINDOW_LOG_MAX: Final = 27
"""A zstd frame may ask for a window of 128 MiB, what `zstd --long` makes."""

GROWTH_MAX: Final = 256
"""How many times its compressed bytes an input may be, beside `GROWTH_BYTES`; prompts shrink to a twentieth at best."""
GROWTH_BYTES: Final = 64 * 1024 * 1024
BLANK_LINES_MAX: Final = 1000
"""Empty lines in succession."""

DAMAGED: Final[tuple[type[Exception], ...]] = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading raises when the compressed bytes are damaged or end too early; `damaged_errors` adds zstd's."""


def opened(chunks: Iterator[bytes], stop: Stop | None = None) -> BinaryIO:
    """The bytes of ``chunks`` as a stream; gzip and zstd, told by their first bytes, are decompressed.

    Reading raises InputInvalid where a few compressed bytes become too many, and Stopped after ``stop``.
    """
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= _HEAD_BYTES:
            break
    source = _Chunks(chain((head,), chunks), stop or Stop())
    raw = io.BufferedReader(source, _BUFFER_BYTES)
    if head.startswith(_GZIP):
        grown: Any = gzip.GzipFile(fileobj=raw)
    elif head.startswith(_ZSTD):
        from backports import zstd

        options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG_MAX}
        grown = zstd.ZstdFile(raw, options=options)
    else:
        return raw
    return io.BufferedReader(_Grown(grown, source), _BUFFER_BYTES)


def damaged_errors() -> tuple[type[Exception], ...]:
    """What reading a stream raises when the compressed bytes are damaged."""
    zstd = sys.modules.get("backports.zstd")  # loaded where an input of its kind is read
    return DAMAGED if zstd is None else (*DAMAGED, zstd.ZstdError)


def lines(stream: BinaryIO, bytes_max: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines with their numbers from 1; None stands for one of more than ``bytes_max`` bytes.

    Raises:
        InputInvalid: many in succession are empty.
    """
    number = blank = 0
    while line := stream.readline(bytes_max + 1):
        number += 1
        blank = 0 if len(line) > 2 or line.strip() else blank + 1
        if blank > BLANK_LINES_MAX:
            raise InputInvalid(f"line {number}: over {BLANK_LINES_MAX} empty lines in succession")
        if len(line) <= bytes_max:
            yield number, line
            continue
        yield number, None  # whoever goes no further reads no more of it
        while line and not line.endswith(b"\n"):
            line = stream.readline(_BUFFER_BYTES)


class _Chunks(io.RawIOBase):
    """Pieces of any length as a raw stream."""

    def __init__(self, chunks: Iterator[bytes], stop: Stop) -> None:
        self.read_bytes = 0
        self.stop = stop
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # type: ignore[override]
        if self.stop.is_set:
            raise Stopped
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


class _Grown(io.RawIOBase):
    """What decompression makes of the bytes of ``source``, as long as it is not far more than they are."""

    def __init__(self, stream: Any, source: _Chunks) -> None:
        self._stream, self._source = stream, source
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # type: ignore[override]
        if self._source.stop.is_set:
            raise Stopped
        size: int = self._stream.readinto(buffer)
        self._size += size
        if self._size > GROWTH_BYTES + GROWTH_MAX * self._source.read_bytes:
            raise InputInvalid(
                f"the compressed input grows to over {GROWTH_MAX} times its size: send it uncompressed"
            )
        return size
