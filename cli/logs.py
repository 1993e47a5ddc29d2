"""`sluice logs`: the logs of the processes of `sluice up`, merged by time."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from typer import Argument, BadParameter, Option

from cli import failure, options, output
from cli.commands import wants_json
from sluice.telemetry.logs import LEVELS, Level, LogLine, parse

_TAIL_BYTES: Final = 1 << 20
"""Bytes at the end of each file that are read at first; what is before them is not shown."""
_POLL_S: Final = 0.2
_SPANS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_COLOURS: Final = {"warning": "yellow", "error": "red"}


def logs(
    processes: list[str] | None = Argument(
        None, help="As `sluice status` names them.", metavar="PROCESS..."
    ),
    level: Level = Option("debug", help="Minimum log level."),
    request: str = Option("", help="Only lines about this request, or this trace.", metavar="ID"),
    since: str = Option("", help="Only events younger than 30s, 10m, 2h or 1d.", metavar="TIME"),
    tail: int = Option(100, help="Show the last N events; 0: all.", min=0, metavar="N"),
    follow: bool = Option(False, "--follow", "-f", help="Show new lines until Ctrl-C."),
    state_dir: options.StateDir = None,
) -> None:
    """Show the logs of the mesh's processes, in the order of time. With --json one object a line."""
    oldest = time.time() - _seconds(since) if since else 0.0
    files = [_LogFile(path) for path in _paths(state_dir, processes or ())]

    def is_selected(line: LogLine) -> bool:
        loud = line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)
        return loud and line.at >= oldest and (not request or line.is_about(request))

    lines = sorted(filter(is_selected, _read(files)), key=lambda line: line.at)
    _write(lines[-tail:])
    while follow:
        time.sleep(_POLL_S)
        _write(sorted(filter(is_selected, _read(files)), key=lambda line: line.at))


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise BadParameter(f"{text!r} is not like 30s, 10m, 2h or 1d", param_hint="--since")
    return int(match[1]) * _SPANS[match[2]]


def _paths(state_dir: Path | None, names: Sequence[str]) -> list[Path]:
    from supervisor.state import StateDir

    state = StateDir(state_dir)
    files = sorted(state.logs.glob("*.log"))
    if not files:
        raise failure.CommandFailed("NO_LOGS", f"no mesh has written a log in {state.logs}")
    missing = [name for name in names if not any(_is_of(path, name) for path in files)]
    if missing:
        process_names = ", ".join(path.stem for path in files)
        message = f"{', '.join(missing)}: no such process; there are {process_names}"
        raise failure.CommandFailed("NO_LOGS", message)
    return [path for path in files if not names or any(_is_of(path, name) for name in names)]


def _is_of(path: Path, name: str) -> bool:
    return path.stem == name or path.stem.startswith((f"{name}.", f"{name}-"))


class _LogFile:
    """A log that grows, and that may be moved away for a new one.

    Attributes:
        process: whose it is.
    """

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._inode = self._offset = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                self._find_place(os.fstat(file.fileno()))
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        self._offset += len(text)
        *whole, self._rest = (self._rest + text).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def _find_place(self, now: os.stat_result) -> None:
        if now.st_ino != self._inode or now.st_size < self._offset:
            # The first time its end is enough.
            self._offset = 0 if self._inode else max(0, now.st_size - _TAIL_BYTES)
            self._inode, self._rest = now.st_ino, b""


def _read(files: Iterable[_LogFile]) -> Iterator[LogLine]:
    """Yield what is new in each log, together with lines that continue an event."""
    year = datetime.now().year
    for file in files:
        last: LogLine | None = None
        for text in file.lines():
            line = parse(text, file.process, year)
            if line is None and last is not None:
                last = replace(last, message=f"{last.message}\n{text}")
                continue
            if last is not None:
                yield last
            last = line or LogLine(time.time(), file.process, "info", text)
        if last is not None:
            yield last


def _write(lines: Iterable[LogLine]) -> None:
    for line in lines:
        if wants_json():
            when = datetime.fromtimestamp(line.at).astimezone().isoformat(timespec="milliseconds")
            fields = {key: value for key, value in asdict(line).items() if value and key != "at"}
            output.write_json({"time": when, **fields})
            continue
        when = datetime.fromtimestamp(line.at).strftime("%H:%M:%S.%f")[:-3]
        about = f"  [{line.request_id}]" if line.request_id else ""
        text = f"{when} {line.process:15} {line.level:7} {line.message}{about}"
        output.write_styled(text, fg=_COLOURS.get(line.level))
