"""Log lines: what is written is read again, and what NATS and Triton write too."""

import contextvars
import io
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sluice.telemetry.logs import (
    BURST,
    CAUSES_MAX,
    LogFormat,
    RepeatFilter,
    log_to_stderr,
    parse,
    subject,
)

TRACE = "ab" * 16


def written(monkeypatch: pytest.MonkeyPatch, form: LogFormat, log: Callable[[], Any]) -> list[str]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    log_to_stderr("info", form)
    try:
        contextvars.copy_context().run(log)
    finally:
        root.setLevel(level)
    return stream.getvalue().splitlines()


def fail() -> None:
    subject.set(("req-1", TRACE))
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("gateway.x").exception("it failed: %s", "a b")


def test_text_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = written(monkeypatch, "text", fail)
    line = parse(first, "gateway", 2026)
    assert line is not None
    assert (line.level, line.logger, line.message) == ("error", "gateway.x", "it failed: a b")
    assert (line.request_id, line.trace_id) == ("req-1", TRACE)
    assert rest[-1] == "ValueError: wrong"
    assert all(parse(one, "gateway", 2026) is None for one in rest)
    (plain,) = written(monkeypatch, "text", lambda: logging.getLogger("a").info("b"))
    assert plain.endswith("INFO a b")


def test_json_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = written(monkeypatch, "json", fail)
    assert json.loads(text)["trace_id"] == TRACE
    line = parse(text, "gateway", 2026)
    assert line is not None
    assert line.message.startswith("it failed: a b\nTraceback")
    assert line.is_about("req-1")
    assert line.is_about(TRACE)
    assert not line.is_about("req-2")
    assert parse('{"time": "never"}', "gateway", 2026) is None


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        ("[6698] 2026/11/22 11:15:37.635594 [INF] Starting nats-server", "info", "Starting nats-server"),
        ("[6698] 2026/11/22 11:15:37.635594 [FTL] no port", "error", "no port"),
        ("W1122 11:15:39.314770 6705 server.cc:283] \"pool disabled\"", "warning", "pool disabled"),
        (
            "2026-11-22 11:15:59,283 INFO model_workers.backend: worker w-1 serves small",
            *("info", "worker w-1 serves small"),
        ),
    ],
)  # fmt: skip
def test_lines_of_other_servers(text: str, level: str, message: str) -> None:
    line = parse(text, "p", 2026)
    assert line is not None
    assert (line.level, line.message) == (level, message)


def test_what_is_no_event_continues_the_one_before() -> None:
    for text in ("", "  at x", "+----+", "[1] no time", "X1322 99:99:99.000000 1 a] b"):
        assert parse(text, "p", 2026) is None


@pytest.mark.parametrize(
    "text",
    [
        'E1127 20:48:01.098106 8126 server.cc:241] "CudaDriverHelper has not been initialized."',
        'E1127 20:48:01.098106 8126 main.cc:1] "failed to stop server: Internal - Exit timeout expired. Exiting"',
        "[7] 2026/11/27 20:48:00.711000 [WRN] Plaintext passwords detected, use nkeys or bcrypt",
    ],
)
def test_what_each_start_and_stop_brings_is_no_error(text: str) -> None:
    line = parse(text, "x", 2026)
    assert line is not None
    assert line.level == "info"
    assert "(harmless: " in line.message


def record_of(message: str, *args: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("gateway", level, "", 0, message, args, None)


def test_repeats_of_a_cause_are_left_out_and_counted() -> None:
    now = 0.0
    repeats = RepeatFilter(lambda: now)
    passed = [repeats.filter(record_of("frames are dropped: %s", number)) for number in range(1000)]
    assert sum(passed) == BURST
    now = 1.0
    next_one = record_of("frames are dropped: %s", "more")
    assert repeats.filter(next_one)
    assert next_one.getMessage() == f"frames are dropped: more ({1000 - BURST} more were left out)"
    assert not repeats.filter(record_of("frames are dropped: %s", "again"))
    now = 60.0
    later = record_of("frames are dropped: %s", "later")
    assert repeats.filter(later)
    assert later.getMessage() == "frames are dropped: later (1 more were left out)"


def test_a_cause_does_not_silence_others() -> None:
    repeats = RepeatFilter(lambda: 0.0)
    for _ in range(BURST + 1):
        repeats.filter(record_of("one"))
    assert not repeats.filter(record_of("one"))
    assert repeats.filter(record_of("two"))
    assert all(repeats.filter(record_of("one", level=logging.INFO)) for _ in range(100))


def test_causes_are_bounded() -> None:
    repeats = RepeatFilter(lambda: 0.0)
    for number in range(3 * CAUSES_MAX):
        repeats.filter(record_of(f"cause {number}"))
    assert len(repeats._causes) <= CAUSES_MAX


def test_the_log_of_a_process_leaves_out_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    def log() -> None:
        for number in range(100):
            logging.getLogger("gateway").warning("attempt %d", number)

    assert len(written(monkeypatch, "text", log)) == BURST
