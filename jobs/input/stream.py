"""Bytes of an input as one binary stream, decompressed, and its lines. Memory is bounded whatever the input holds."""

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO, Final, cast

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_HEAD_BYTES: Final = 64
_BUFFER_BYTES: Final = 64 * 1024
_WINDOW_LOG_MAX: Final = 27
"""A zstd frame may ask for a window of 128 MiB, what `zstd --long` makes."""

DAMAGED: Final[tuple[type[Exception], ...]] = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading raises when the compressed bytes are damaged or end too early; `damaged_errors` adds that of zstd."""


def opened(chunks: Iterator[bytes]) -> BinaryIO:
    """The bytes of ``chunks`` as a stream; gzip and zstd, told by their first bytes, are decompressed."""
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= _HEAD_BYTES:
            break
    raw = io.BufferedReader(_Chunks(chain((head,), chunks)), _BUFFER_BYTES)
    if head.startswith(_GZIP):
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    if head.startswith(_ZSTD):
        from backports import zstd

        options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG_MAX}
        return cast("BinaryIO", zstd.ZstdFile(raw, options=options))
    return raw


def damaged_errors(stream: BinaryIO) -> tuple[type[Exception], ...]:
    """What reading ``stream`` raises when the compressed bytes are damaged."""
    if isinstance(stream, gzip.GzipFile | io.BufferedReader):
        return DAMAGED
    from backports import zstd

    return (*DAMAGED, zstd.ZstdError)


def lines(stream: BinaryIO, bytes_max: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines with their numbers from 1; None stands for one of more than ``bytes_max`` bytes."""
    number = 0
    while line := stream.readline(bytes_max + 1):
        number += 1
        if len(line) <= bytes_max:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(_BUFFER_BYTES)
        yield number, None


class _Chunks(io.RawIOBase):
    """Pieces of any length as a raw stream."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
