"""Child process that reads Parquet: the file is its standard input, rows go to its standard output.

The content of the file decides how much memory and time reading takes: a dictionary value may occur
in any number of rows. So the process has a memory limit and may be killed. Its argument is a JSON
list of columns. It prints lines of JSON: the columns of the file, each row (an object, or a
string that says why it cannot be used), and null at the end.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, Final

MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Memory that a file may take, beside the process itself."""
ROW_BYTES_MAX: Final = 1 << 20
"""Longest row, in bytes of Arrow arrays; as JSON it may have 8 times as many characters."""
CPU_S: Final = 600
"""CPU time of a whole file, in seconds."""
_ROWS: Final = 64
"""Rows that are decoded at a time."""


NICE: Final = 10
"""Niceness that is added to that of the jobs process: processes that answer callers go first."""


def main() -> None:
    """Read the file to its end."""
    os.nice(NICE)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # The limit is on top of what the process has mapped already, libraries included.
    pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])  # noqa: SIM115
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    wanted_names = set(json.loads(sys.argv[1]))
    source = pq.ParquetFile(sys.stdin.buffer)
    names = source.schema_arrow.names
    _write(names)
    columns = [name for name in names if name in wanted_names]
    # Values that repeat stay in their dictionary until their row is taken; lists and structs have none.
    types = source.schema_arrow.field
    flat = [name for name in columns if not pa.types.is_nested(types(name).type)]
    source = pq.ParquetFile(sys.stdin.buffer, read_dictionary=flat)
    for batch in source.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False):
        for position in range(batch.num_rows):
            _write(_row(batch, position))
    _write(None)
    sys.stdout.flush()


def _row(batch: Any, position: int) -> dict[str, Any] | str:
    row, size = {}, 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column.slice(position, 1)
        value = value.dictionary_decode() if hasattr(value, "dictionary") else value
        size += value.nbytes
        if size > ROW_BYTES_MAX:
            return f"is longer than {ROW_BYTES_MAX} bytes"
        try:
            row[name] = _decoded(value[0].as_py())
        except UnicodeDecodeError:
            return f"column {name}: has bytes that are not valid UTF-8"
    return row


def _decoded(value: Any) -> Any:
    """Return `value` with bytes at any depth decoded from UTF-8: some writers store text as bytes."""
    match value:
        case bytes():
            return value.decode()
        case list() | tuple():
            return [_decoded(item) for item in value]
        case dict():
            return {key: _decoded(item) for key, item in value.items()}
        case _:
            return value


def _write(line: object) -> None:
    text = json.dumps(line, default=str)
    if len(text) > 8 * ROW_BYTES_MAX:
        text = json.dumps(f"is longer than {ROW_BYTES_MAX} bytes")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
