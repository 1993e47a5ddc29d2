"""`scripts/jaeger-check` against the JSON of a Jaeger's query service."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.telemetry import names
from tests.support.test_trace_rules import TRACE
from tests.support.trace_rules import TraceSpan

SCRIPT = Path(__file__).parents[2] / "scripts" / "jaeger-check"


def in_jaeger(spans: list[TraceSpan]) -> dict[str, Any]:
    return {
        "traceID": "t1",
        "processes": {"p1": {"serviceName": "s"}},
        "spans": [
            {
                "traceID": "t1",
                "spanID": one.span_id,
                "operationName": one.name,
                "processID": "p1",
                "startTime": one.start_ns // 1000,
                "duration": (one.end_ns - one.start_ns) // 1000,
                "references": [{"refType": "CHILD_OF", "traceID": "t1", "spanID": one.parent_id}],
                "tags": [
                    {"key": key, "value": json.dumps(value) if isinstance(value, tuple) else value}
                    for key, value in one.attributes.items()
                ],
            }
            for one in spans
        ],
    }


@contextmanager
def jaeger(*traces: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert f"service={names.SERVICE_GATEWAY}" in self.path
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": traces}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def check(url: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(SCRIPT), url)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_whole_traces_pass_and_others_are_named() -> None:
    whole = in_jaeger(list(TRACE.values()))
    with jaeger(whole) as url:
        passed = check(url)
    assert (passed.returncode, passed.stdout) == (0, "1 traces, 0 of them not whole\n")
    broken = in_jaeger([one for name, one in TRACE.items() if name != names.SPAN_TASK])
    with jaeger(whole, broken) as url:
        failed = check(url)
    assert failed.returncode == 1
    assert failed.stdout.startswith("t1: spans without a parent: s batch, s queue")


def test_a_jaeger_that_is_not_there_is_said_in_one_line() -> None:
    failed = check("http://127.0.0.1:1")
    assert failed.returncode == 2
    assert failed.stderr.startswith("jaeger-check: http://127.0.0.1:1: ")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.skipif("SLUICE_JAEGER" not in os.environ, reason="SLUICE_JAEGER names no Jaeger")
def test_the_traces_of_a_real_jaeger_are_whole() -> None:
    passed = check(os.environ["SLUICE_JAEGER"])
    assert passed.returncode == 0, passed.stdout
