"""Small inputs that would take much memory, disk or time: each ends with an error that says what to do."""

import io
import threading
from collections.abc import Iterator

import psutil
import pytest

from jobs.input import Format, read_items
from jobs.input import tables as tables_module
from jobs.items import Item
from jobs.threads import ReadingStopped, StopSignal
from sluice.errors import InputInvalid
from tests.jobs import bombs

pytest.importorskip("backports.zstd")
MIB = 1 << 20


def read(data: bytes, format: Format = Format.AUTO) -> tuple[list[Item], int]:
    """The items, and how much memory this process took in addition, MiB."""
    process, most = psutil.Process(), 0
    before = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, process.memory_info().rss - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        return list(read_items(iter([data]), format)), most >> 20
    finally:
        done.set()
        watching.join()
        assert most < 100 * MIB


def refused(data: bytes, format: Format = Format.AUTO) -> str:
    with pytest.raises(InputInvalid) as found:
        read(data, format)
    return str(found.value)


def test_a_line_of_a_csv_has_a_limit() -> None:
    line = b"prompt\n" + b"x" * (90 * MIB)
    assert "is longer than 1048576 bytes" in refused(line, Format.CSV)
    assert "is longer than 1048576 bytes" in refused(bombs.long_line(), Format.CSV)


def test_a_row_of_a_csv_has_a_limit() -> None:
    assert "or its row has over 4194304" in refused(bombs.open_quote(), Format.CSV)


def test_empty_lines_end() -> None:
    assert "over 1000 consecutive empty lines" in refused(bombs.blank_lines())
    table = b"prompt\n" + b"\n" * 200_000
    assert "over 1000 consecutive empty lines" in refused(table, Format.CSV)


@pytest.mark.parametrize(
    "format", [pytest.param(Format.JSONL, marks=pytest.mark.long), Format.TEXT, Format.PARQUET]
)
def test_what_is_compressed_grows_to_a_limit(format: Format) -> None:
    assert "expands to over 256 times its size" in refused(bombs.compressed(), format)


def test_a_value_of_parquet_in_many_rows_takes_the_memory_of_one() -> None:
    pytest.importorskip("pyarrow")
    bomb = bombs.parquet(25 * MIB, 64)
    assert len(bomb) < 8192
    items, _ = read(bomb)
    assert not [one for one in items if one.outcome is None]
    assert len(items) == 64
    assert "is longer than 1048576 bytes" in str(items[0])


def test_a_row_of_parquet_has_a_limit_in_lists_too() -> None:
    pytest.importorskip("pyarrow")
    (item,), _ = read(bombs.parquet_list(1000, 1100))
    assert "is longer than 1048576 bytes" in str(item)


def test_rows_of_parquet_are_measured_without_their_dictionary() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    prompts = [letter * 100_000 for letter in "abcdefghijkl"]
    parquet.write_table(pyarrow.table({"prompt": prompts}), file)
    items, _ = read(file.getvalue())
    assert [item.outcome for item in items] == [None] * len(prompts)


def test_what_takes_too_much_memory_ends_its_reader_alone() -> None:
    pytest.importorskip("pyarrow")
    assert "takes more than 512 MiB" in refused(bombs.parquet_list(8 * MIB, 60))


def test_a_parquet_file_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables_module, "PARQUET_BYTES_MAX", 100)
    assert "split it into several files" in refused(bombs.parquet(1000, 2))


@pytest.mark.parametrize("format", [Format.JSONL, Format.CSV])
def test_reading_ends_when_it_is_stopped(format: Format) -> None:
    stop = StopSignal()

    def chunks() -> Iterator[bytes]:
        yield b"prompt\n" + b'{"prompt": "x"}\n' * 10
        while True:
            yield b"x" * 1000 + b"\n"
            stop.set_result(None)

    with pytest.raises(ReadingStopped):
        list(read_items(chunks(), format, stop=stop))


def test_a_reader_of_parquet_ends_when_it_is_stopped() -> None:
    pytest.importorskip("pyarrow")
    stop = StopSignal()
    items = read_items(iter([bombs.parquet(10, 200_000)]), stop=stop)
    next(items)
    stop.set_result(None)
    with pytest.raises(ReadingStopped):
        list(items)
