"""Inputs of a few bytes that become many."""

import gzip
import io
from collections.abc import Iterator
from functools import cache
from typing import Any

BLANKS = 40_000_000


def zstd_of(pieces: Iterator[bytes]) -> bytes:
    from backports import zstd

    file = io.BytesIO()
    with zstd.ZstdFile(file, "w") as writer:
        for piece in pieces:
            writer.write(piece)
    return file.getvalue()


@cache
def compressed() -> bytes:
    """Kilobytes that are 300 MiB."""
    return gzip.compress(b"x" * (300 << 20))


def long_line() -> bytes:
    """A CSV whose second line has a gigabyte."""
    return zstd_of(b"prompt\n" if n == 0 else b"x" * (1 << 20) for n in range(1025))


def open_quote() -> bytes:
    """A CSV whose second row has more and more lines."""
    return b'prompt\n"' + b'a\n","' * 3_000_000


def blank_lines() -> bytes:
    """Millions of empty lines."""
    return zstd_of(b"\n" * (1 << 20) for _ in range(512))


def parquet(value_bytes: int, rows: int) -> bytes:
    """One value of so many bytes in so many rows: a dictionary of one entry."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * value_bytes])
    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": column}), file, compression="zstd")
    return file.getvalue()


def parquet_list(value_bytes: int, items: int) -> bytes:
    """A row whose list has one value of so many bytes so many times."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    items_of: Any = pa.DictionaryArray.from_arrays(
        pa.array([0] * items, pa.int32()), ["x" * value_bytes]
    ).cast(pa.string())
    column = pa.ListArray.from_arrays([0, items], items_of)
    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": column}), file, compression="zstd")
    return file.getvalue()
