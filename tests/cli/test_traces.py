"""`sluice traces check`: against answers of Jaeger's query API as it writes them."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest

from cli.jaeger import full_id
from sluice.telemetry import names
from tests.cli.commands import Cli

RECORDED: Final = Path(__file__).parent / "data/jaeger_trace.json"
"""An answer of /api/traces/{id}: a request whose batch had a row of another trace."""
TRACE: Final = "00f067aa0ba902b7a3ce929d0e0e4736"
OTHER: Final = "4bf92f3577b34da6a3ce929d0e0e4736"


def recorded() -> dict[str, Any]:
    trace = json.loads(RECORDED.read_text())["data"][0]
    assert isinstance(trace, dict)
    return trace


def without(trace: dict[str, Any], *operations: str) -> dict[str, Any]:
    spans = [span for span in trace["spans"] if span["operationName"] not in operations]
    return {**trace, "spans": spans}


class FakeJaeger:
    """Serves traces as Jaeger's query service does.

    Attributes:
        asked: the parameters of each search.
        got: the ids of each trace that was asked for.
    """

    def __init__(self, *traces: dict[str, Any]) -> None:
        self.traces = traces
        self.asked: list[dict[str, list[str]]] = []
        self.got: list[str] = []

    def answer(self, path: str) -> tuple[int, Any]:
        parts = urlsplit(path)
        if parts.path == "/api/traces":
            self.asked.append(parse_qs(parts.query))
            return 200, list(self.traces)
        trace_id = parts.path.rpartition("/")[2]
        self.got.append(trace_id)
        found = [trace for trace in self.traces if full_id(trace["traceID"]) == trace_id]
        return (200, found) if found else (404, None)

    @contextmanager
    def serve(self) -> Iterator[str]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, data = fake.answer(self.path)
                errors = None if status == 200 else [{"code": status, "msg": "trace not found"}]
                body = {"data": data, "total": 0, "limit": 0, "offset": 0, "errors": errors}
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        with served(Handler) as address:
            yield address


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def linked() -> dict[str, Any]:
    """The trace that the recorded one links to."""
    trace = json.loads(json.dumps(recorded()).replace(TRACE.lstrip("0"), OTHER))
    assert isinstance(trace, dict)
    return trace


async def test_whole_traces_give_exit_code_0(cli: Cli) -> None:
    jaeger = FakeJaeger(recorded(), linked())
    with jaeger.serve() as url:
        ran = await cli("traces", "check", "--jaeger", url, "--limit", "7", "--lookback", "60")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "2 whole, 0 incomplete, 0 faulty\n"
    (asked,) = jaeger.asked
    assert (asked["service"], asked["limit"]) == (["sluice-gateway"], ["7"])
    assert int(asked["end"][0]) - int(asked["start"][0]) == pytest.approx(60e6, abs=2)


async def test_named_traces_are_read_with_those_they_link_to(cli: Cli) -> None:
    jaeger = FakeJaeger(recorded(), linked())
    with jaeger.serve() as url:
        ran = await cli("traces", "check", TRACE.lstrip("0"), TRACE, "--jaeger", url, "--json")
    assert ran.code == 0
    (trace,) = json.loads(ran.out)["traces"]
    assert (trace["trace_id"], trace["verdict"], trace["spans"]) == (TRACE, "whole", 12)
    assert jaeger.got == [TRACE, OTHER]
    assert not jaeger.asked


@pytest.mark.parametrize(
    ("missing", "fault"),
    [
        ((names.SPAN_TASK,), "spans without a parent"),
        ((names.SPAN_PREFILL, names.SPAN_DECODE), "no span of sluice-worker"),
        (
            (*(names.SPAN_TASK, names.SPAN_QUEUE, names.SPAN_BATCH), *("prefill", "decode")),
            "no span of sluice-batcher",
        ),
    ],
)
async def test_lost_spans_are_named(cli: Cli, missing: Sequence[str], fault: str) -> None:
    with FakeJaeger(without(recorded(), *missing), linked()).serve() as url:
        ran = await cli("traces", "check", TRACE, "--jaeger", url)
    assert ran.code == 1
    assert f"{TRACE}  faulty\n" in ran.out
    assert fault in ran.out
    assert "NOT_WHOLE: 1 of 1 not whole" in ran.err


async def test_links_that_lead_nowhere_are_named(cli: Cli) -> None:
    with FakeJaeger(recorded()).serve() as url:
        ran = await cli("traces", "check", TRACE, "--jaeger", url)
    assert ran.code == 1
    assert "sluice-batcher batch: a link leads nowhere" in ran.out


async def test_spans_of_triton_are_required_on_request(cli: Cli) -> None:
    bare = without(recorded(), "InferRequest", "compute")
    with FakeJaeger(bare, linked()).serve() as url:
        assert (await cli("traces", "check", TRACE, "--jaeger", url)).code == 0
        ran = await cli("traces", "check", TRACE, "--triton", "--jaeger", url)
    assert ran.code == 1
    assert "no span of sluice-triton" in ran.out


async def test_a_trace_without_a_root_is_faulty(cli: Cli) -> None:
    kept = {"InferRequest", "compute"}
    spans = [span for span in recorded()["spans"] if span["operationName"] in kept]
    with FakeJaeger({**recorded(), "spans": spans}).serve() as url:
        ran = await cli("traces", "check", TRACE, "--jaeger", url)
    assert "it has no root" in ran.out


async def test_trace_of_a_recovered_answer_is_incomplete(cli: Cli) -> None:
    trace = without(recorded(), names.SPAN_PREFILL, names.SPAN_DECODE)
    (root,) = (span for span in trace["spans"] if span["operationName"] == names.SPAN_GENERATE)
    root["tags"].append({"key": names.RECOVERED_FROM, "type": "string", "value": "worker"})
    with FakeJaeger(trace).serve() as url:
        ran = await cli("traces", "check", TRACE, "--jaeger", url)
        listed = await cli("traces", "check", TRACE, "--jaeger", url, "--json")
    assert ran.code == listed.code == 1
    assert "incomplete\n  spans may be missing: lost with a worker\n" in ran.out
    described = json.loads(listed.out)
    assert (described["incomplete"], described["faulty"]) == (1, 0)
    assert described["error"]["reason"] == "NOT_WHOLE"


async def test_unknown_ids_are_not_whole(cli: Cli) -> None:
    with FakeJaeger(recorded()).serve() as url:
        ran = await cli("traces", "check", "f" * 32, "--jaeger", url)
        wrong = await cli("traces", "check", "req-1", "--jaeger", url)
        none = await cli("traces", "check", "--jaeger", f"{url}/base")
    assert ran.code == 1
    assert "Jaeger has no trace of this id" in ran.out
    assert wrong.code == 2
    assert "'req-1' is no trace id" in wrong.err
    assert none.code == 1


async def test_no_traces_are_not_all_whole(cli: Cli) -> None:
    with FakeJaeger().serve() as url:
        ran = await cli("traces", "check", "--jaeger", url)
    assert ran.code == 1
    assert "NO_TRACES" in ran.err


async def test_nobody_at_the_address_is_said_at_once(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ran = await cli("traces", "check", "--jaeger", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ran.code == 1
    assert "UNREACHABLE" in ran.err
    assert "refused" in ran.err


@pytest.mark.parametrize("body", [b"<html>nginx</html>", b"{}", b"[1]", b'{"data": [{"x": 1}]}'])
async def test_what_is_no_jaeger_is_named(cli: Cli, body: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as url:
        ran = await cli("traces", "check", "--jaeger", url)
    assert ran.code == 1
    assert "NOT_JAEGER" in ran.err


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b'{"detail": "Not Found"}', "NOT_JAEGER"),
        (500, b'{"data": null, "errors": [{"msg": "no storage"}]}', "no storage"),
        (200, b" " * 1_000 + b'{"data": []}', "TOO_LARGE"),
        (503, b"<html>" + b" " * 1_000, "TOO_LARGE"),
    ],
)
async def test_answers_of_other_servers_are_no_missing_traces(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, reason: str
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr("cli.jaeger.BYTES_MAX", 900)
    with served(Handler) as url:
        ran = await cli("traces", "check", "--jaeger", url)
    assert ran.code == 1
    assert reason in ran.err


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
async def test_an_address_that_is_none_is_refused(cli: Cli, url: str) -> None:
    ran = await cli("traces", "check", "--jaeger", url)
    assert ran.code == 1
    assert "write http://HOST:16686" in ran.err
