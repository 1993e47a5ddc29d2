"""The log of a process: one line an event, as text or as JSON, with request and trace of what it is about.

`parse` reads what any process of a mesh writes: ours in both formats, nats-server's and Triton's. Text times are those
of the machine.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, get_args

LogFormat = Literal["text", "json"]

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
BURST: Final = 5
"""Lines of one cause that may come at once: several processes can end in the same second."""
REPEAT_S: Final = 1.0
"""Interval between lines of one cause that goes on, in seconds."""
CAUSES_MAX: Final = 1000
"""Bound of the causes that are known: messages of libraries may have no arguments."""
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
subject: Final[ContextVar[tuple[str, str]]] = ContextVar("subject", default=("", ""))
"""Ids of the request and the trace that the lines of this task are about; set it where they are known."""


def log_to_stderr(level: str, form: LogFormat = "text") -> None:
    """Start the log of a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RepeatFilter())
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class RepeatFilter(logging.Filter):
    """Leave out warnings and errors that repeat: what a stranger can cause again and again must not fill a disk.

    1. The cause of a line is its logger and its message without arguments.
    2. A cause may have `BURST` lines at once, then one each `REPEAT_S`.
    3. The next line of the cause says how many were left out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._causes: dict[tuple[str, str], _Cause] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to write a record, which gets the number of those left out before it."""
        if record.levelno < logging.WARNING:
            return True
        now, key = self._clock(), (record.name, str(record.msg))
        if len(self._causes) >= CAUSES_MAX and key not in self._causes:
            self._causes.clear()
        cause = self._causes.setdefault(key, _Cause(now))
        if not cause.takes(now):
            return False
        if cause.left_out:
            record.msg = f"{record.getMessage()} ({cause.left_out} more were left out)"
            record.args, cause.left_out = (), 0
        return True


@dataclass
class _Cause:
    """What is known of the lines of one cause.

    Attributes:
        refilled_at: when `tokens` was right.
        tokens: lines that it may have now.
        left_out: lines since the last one that was written.
    """

    refilled_at: float
    tokens: float = BURST
    left_out: int = 0

    def takes(self, now: float) -> bool:
        """Take a line if there is one; else count it as left out."""
        self.tokens = min(BURST, self.tokens + (now - self.refilled_at) / REPEAT_S)
        self.refilled_at = now
        if self.tokens < 1:
            self.left_out += 1
            return False
        self.tokens -= 1
        return True


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without a traceback."""
        request_id, trace_id = subject.get()
        ids = f" request_id={request_id} trace_id={trace_id}" if request_id else ""
        return super().formatMessage(record) + ids


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object; a traceback is part of its message."""
        request_id, trace_id = subject.get()
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if request_id:
            line |= {"request_id": request_id, "trace_id": trace_id}
        return json.dumps(line, ensure_ascii=False)


@dataclass(frozen=True)
class LogLine:
    """One event.

    Attributes:
        at: Unix seconds.
        level: one of `LEVELS`, or another word that the line has.
        message: with the lines of a traceback.
    """

    at: float
    process: str
    level: str
    message: str
    logger: str = ""
    request_id: str = ""
    trace_id: str = ""

    def is_about(self, request: str) -> bool:
        """Return whether the event names the request or the trace."""
        return request in (self.request_id, self.trace_id) or request in self.message


_OURS: Final = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<ms>\d{3}) (?P<level>[A-Z]+) (?P<logger>\S+) (?P<message>.*?)"
    r"(?: request_id=(?P<request>\S+) trace_id=(?P<trace>\S*))?$"
)
_NATS: Final = re.compile(
    r"\[\d+\] (?P<time>\d{4}/\d\d/\d\d \d\d:\d\d:\d\d)\.(?P<ms>\d{3})\d* \[(?P<level>[A-Z]{3})\] (?P<message>.*)"
)
_TRITON: Final = re.compile(
    r"(?P<level>[IWEF])(?P<time>\d{4} \d\d:\d\d:\d\d)\.(?P<ms>\d{3})\d* \d+ (?P<logger>\S+?)\] (?P<message>.*)"
)
_HARMLESS: Final = {
    "CudaDriverHelper has not been initialized": "harmless: Triton itself uses no GPU",
    "failed to stop server: Internal - Exit timeout expired": "harmless: its models were unloading",
    "Plaintext passwords detected": "harmless: they are made for this mesh, and the server is on loopback",
}
"""Warnings and errors of other programs that each start or stop of a mesh brings, with why nothing is wrong."""
_WORDS: Final = {
    **dict.fromkeys(("DBG", "TRC"), "debug"),
    **dict.fromkeys(("INF", "I"), "info"),
    **dict.fromkeys(("WRN", "W"), "warning"),
    **dict.fromkeys(("ERR", "FTL", "E", "F", "CRITICAL"), "error"),
}


def parse(line: str, process: str, year: int) -> LogLine | None:
    """Return the event that `line` begins; None if it continues the one before.

    `year`: Triton does not write it.
    """
    if line.startswith("{"):
        return _of_json(line, process)
    for pattern, time_format in (
        (_OURS, "%Y-%m-%d %H:%M:%S"),
        (_NATS, "%Y/%m/%d %H:%M:%S"),
        (_TRITON, "%Y %m%d %H:%M:%S"),
    ):
        if (match := pattern.match(line)) is not None:
            return _of_match(match, time_format, process, year)
    return None


def _of_match(match: re.Match[str], time_format: str, process: str, year: int) -> LogLine | None:
    fields = {key: value or "" for key, value in match.groupdict().items()}
    text = f"{year} {fields['time']}" if match.re is _TRITON else fields["time"]
    try:
        at = time.mktime(time.strptime(text, time_format)) + int(fields["ms"]) / 1e3
    except ValueError:
        return None
    word, message = fields["level"], fields["message"].strip('"')
    level = _WORDS.get(word, word.lower())
    if why := next((why for start, why in _HARMLESS.items() if message.startswith(start)), ""):
        level, message = "info", f"{message} ({why})"
    logger = fields.get("logger", "").rstrip(":")
    ids = fields.get("request", ""), fields.get("trace", "")
    return LogLine(at, process, level, message, logger, *ids)


def _of_json(line: str, process: str) -> LogLine | None:
    try:
        fields = json.loads(line)
        at = datetime.fromisoformat(fields["time"]).timestamp()
        more = (str(fields.get(key, "")) for key in ("logger", "request_id", "trace_id"))
        return LogLine(at, process, str(fields["level"]), str(fields["message"]), *more)
    except (ValueError, KeyError, TypeError):
        return None
