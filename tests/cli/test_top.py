"""`sluice top`, `requests`, `cancel` and `drain`, against a scripted AdminService."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cli import top as top_command
from cli.top import Sample, View, lines, quantile
from sluice.errors import TransportUnavailable
from sluice.telemetry import names
from sluice.telemetry.catalog import METRICS
from sluice.v1 import admin_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from sluice.v1.inference_pb2 import PRIORITY_INTERACTIVE
from sluice.wire.clock import duration
from tests.cli.commands import Cli, served

WORKER = "127.0.0.1:8001/small"
OTHER = "127.0.0.1:8002/small"
GEN_AI = ("chat", "sluice", "small", "interactive")


def series(name: str, *points: tuple[tuple[str, ...], float]) -> pb.MetricSeries:
    found = [pb.MetricPoint(labels=labels, value=value) for labels, value in points]
    return pb.MetricSeries(name=name, labels=METRICS[name].labels, points=found)


def histogram(
    name: str, labels: tuple[str, ...], place: int, count: int, total: float
) -> pb.MetricSeries:
    bounds = METRICS[name].bounds
    buckets = [0] * (len(bounds) + 1)
    buckets[place] = count
    point = pb.MetricPoint(labels=labels, value=total, buckets=buckets)
    return pb.MetricSeries(name=name, bounds=bounds, points=[point])


def metrics(moment: int) -> pb.ReadMetricsResponse:
    """Of a gateway and two batchers that see the same worker; ``moment`` s after they started."""
    gateway = [
        series(
            "sluice.requests",
            (("small", "interactive", "stop"), 3 * moment),
            (("small", "interactive", "OVERLOADED"), moment),
        ),
        histogram("gen_ai.server.time_to_first_token", GEN_AI, 4, 10 * moment, 0.3),
        series("sluice.room.waiting", (("small", "interactive"), 5)),
    ]
    batcher = [
        series("sluice.queue.tasks", (("small", "interactive"), 2)),
        series("sluice.worker.live", (("small", WORKER), 1), (("small", OTHER), 0)),
        series("sluice.worker.drained", (("small", WORKER), 0), (("small", OTHER), 1)),
        series("sluice.worker.slots", (("small", WORKER), 32)),
        series("sluice.worker.running", (("small", WORKER), 7)),
        series("sluice.worker.kv_cache.usage", (("small", WORKER), 0.25)),
        series("sluice.worker.tokens", (("small", WORKER, "output"), 500 * moment)),
        histogram("sluice.worker.step.duration", ("small", WORKER), 1, 10 * moment, 0.02 * moment),
    ]
    service, batchers = names.SERVICE_GATEWAY, names.SERVICE_BATCHER
    return pb.ReadMetricsResponse(
        processes=[
            pb.ProcessMetrics(service=service, instance="gw1", metrics=gateway),
            pb.ProcessMetrics(service=batchers, instance="b1", metrics=batcher),
            pb.ProcessMetrics(service=batchers, instance="b2", metrics=batcher),
        ]
    )


RUNNING = pb.ListRequestsResponse(
    requests=[
        pb.RunningRequest(
            request_id="req-1", tenant="acme", priority=PRIORITY_INTERACTIVE, model="small",
            state=pb.REQUEST_STATE_STREAMING, age=duration(1500), completion_tokens=12, gateway="gw1",
        )
    ],
    counts=[
        pb.RunningCount(
            tenant="acme", model="small", priority=PRIORITY_INTERACTIVE, requests=4, waiting=1,
            completion_tokens=99, oldest_age=duration(2500),
        )
    ],
    gateways=["gw1"],
)  # fmt: skip


class Admin(AdminServiceServicer):
    """Counts its calls, and grows with them."""

    def __init__(self) -> None:
        self.moment = 0
        self.asked: list[Any] = []

    async def ReadMetrics(self, request: pb.ReadMetricsRequest, context: Any) -> Any:
        self.moment += 1
        found = metrics(self.moment)
        for process in found.processes:
            wanted = [one for one in process.metrics if one.name in request.names]
            del process.metrics[:]
            process.metrics.extend(wanted)
        return found

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> Any:
        self.asked.append(request)
        return RUNNING

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Any) -> Any:
        return pb.CancelRequestsResponse(request_ids=["req-1"], silent_gateways=["gw2"])

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> Any:
        self.asked.append(request)
        return pb.DrainWorkerResponse(drained=[f"{request.model} {request.worker}"])


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Admin, str]]:
    service = Admin()
    async with served(add_AdminServiceServicer_to_server, service) as address:
        yield service, address


def view(seconds: int = 1) -> View:
    first = Sample.of(0.0, metrics(1), RUNNING)
    return View(Sample.of(float(seconds), metrics(1 + seconds), RUNNING), first, None)


def test_the_tables_sum_processes_and_take_a_worker_once() -> None:
    made = view(2)
    (model,) = made.tables["models"]
    assert (model["run"], model["queue"], model["req/s"], model["err/s"]) == (4, 9, 4, 1)
    assert model["ttft50"] == pytest.approx(30)
    assert model["itl50"] is None
    one, other = made.tables["workers"]
    assert (one["state"], other["state"]) == ("live", "drained")
    assert (one["rows"], one["slots"], one["kv%"], one["tok/s"]) == (7, 32, 25, 500)
    assert one["step"] == pytest.approx(2)
    assert made.summary()["output_tokens_per_s"] == 500
    assert made.processes() == "2 batcher, 1 gateway"


def test_a_process_that_started_again_counts_from_zero() -> None:
    before = Sample.of(0.0, metrics(9), RUNNING)
    made = View(Sample.of(1.0, metrics(2), RUNNING), before, before)
    (model,) = made.tables["models"]
    assert model["req/s"] == 8


@pytest.mark.parametrize("width", [20, 40, 72, 100])
def test_a_screen_fits_and_shows_whole_numbers(width: int) -> None:
    words = {word for line in lines("a:1", view(), None, 24) for word in line.split()}
    shown = lines("a:1", view(), width, 40)
    assert max(map(len, shown)) <= width
    tables = shown[shown.index("") :]
    assert {word for line in tables for word in line.split() if "~" not in word} <= words
    assert len(lines("a:1", view(), width, 5)) == 5


def test_rows_are_filtered_and_sorted() -> None:
    filtered = lines("a:1", view(), 80, 24, text="8002")
    assert not any("8001" in line or line.startswith(("acme", "small ")) for line in filtered)
    found = [line[:20] for line in lines("", view(), 82, 24, "running") if line.startswith("127.")]
    assert found == [WORKER, OTHER]


def test_a_quantile_lies_in_its_bucket() -> None:
    metric = "gen_ai.server.time_to_first_token"
    bounds = METRICS[metric].bounds
    counts = [0.0] * (len(bounds) + 1)
    assert quantile(metric, (0.0, *counts), 0.5) is None
    counts[2] = 4
    assert quantile(metric, (0.0, *counts), 0.5) == pytest.approx(0.0075)
    counts[-1] = 40
    assert quantile(metric, (0.0, *counts), 0.95) == bounds[-1]


async def test_once_for_people_and_programs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_command, "_ONCE_S", 0.0)
    async with serving() as (_, address):
        ran = await cli("top", "--once", "--address", address)
        told = await cli("top", "--json", "--address", address)
        wrong = await cli("top", "--sort", "colour", "--address", address)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"sluice top  {address}  2 batcher, 1 gateway")
    assert json.loads(told.out)["tenants"][0]["tenant"] == "acme"
    assert wrong.code == 2


def test_a_live_screen_goes_on_where_a_gateway_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [Sample.of(0.0, metrics(1), RUNNING), None, Sample.of(1.0, metrics(2), RUNNING)]

    def sample(_: object) -> Sample:
        if not samples:
            raise KeyboardInterrupt
        if (found := samples.pop(0)) is None:
            raise TransportUnavailable("it is away")
        return found

    monkeypatch.setattr(top_command, "_sample", sample)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    top_command.top(once=False, interval=0.0, sort="name", text="", address="127.0.0.1:1")
    _, first, away, second = capsys.readouterr().out.split("\x1b[H")
    assert "requests/s -" in first
    assert "no answer: it is away" in away
    assert "requests/s 4" in second


async def test_requests_are_listed(cli: Cli) -> None:
    async with serving() as (service, address):
        ran = await cli("requests", "--tenant", "acme", "--address", address)
        told = await cli("requests", "--json", "--address", address)
    for word in ("req-1", "acme", "interactive", "small", "streaming", "1.5", "12", "gw1"):
        assert word in ran.out.split()
    assert ran.out.splitlines()[-1] == "4 requests run, the oldest 1 are shown"
    assert service.asked[0].tenant == "acme"
    assert json.loads(told.out)["total"] == 4


async def test_requests_are_cancelled(cli: Cli) -> None:
    async with serving() as (_, address):
        ran = await cli("cancel", "req-1", "--address", address)
        part = await cli("cancel", "req-1", "req-2", "--json", "--address", address)
        wrong = await cli("cancel", "--address", address)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [
        *("req-1", "1 requests cancelled", "no answer from gw2: their requests may go on")
    ]
    assert part.code == 1
    assert json.loads(part.out)["not_running"] == ["req-2"]
    assert wrong.code == 2


async def test_a_worker_is_drained(cli: Cli) -> None:
    async with serving() as (service, address):
        ran = await cli("drain", "small", WORKER, "--address", address)
        back = await cli("drain", "small", WORKER, "--undo", "--address", address)
        late = await cli("drain", "small", WORKER, "--wait", "0.1", "--address", address)
    assert ran.out.splitlines() == [
        f"{WORKER} of small: drained, 7 rows run",
        "no other worker serves small: its requests wait or fail until --undo",
    ]
    assert back.out == f"{WORKER} of small: back in service\n"
    assert service.asked[1].undo
    assert late.code == 1
    assert "ROWS_LEFT" in late.err
