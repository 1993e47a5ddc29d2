"""What operators see and change: running requests of all gateways, drained workers, metrics. A real nats-server."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.shared.drains import READ_S
from sluice.errors import Cancelled, InvalidRequest, RequestUnknown, WorkerUnknown
from sluice.internal.v1.control_pb2 import ControlMessage, DrainRecord
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.names import SERVICE_BATCHER
from sluice.v1 import admin_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.inference_pb2 import PRIORITY_INTERACTIVE
from sluice.wire import jetstream, subjects
from sluice.wire.bucket import Bucket
from tests.gateway.kit.batcher import WireBatcher, frame
from tests.gateway.kit.wire import Wire, error_of, open_wire, prompt
from tests.gateway.shared.test_peers import know_each_other


def admin(wire: Wire) -> Any:
    return AdminServiceStub(wire.channel)


@pytest.fixture
async def pair(nats_url: str, model_folder: Path) -> AsyncIterator[tuple[Wire, Wire]]:
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1") as one,
        open_wire(nats_url, model_folder, gateway_id="gw2") as two,
    ):
        await know_each_other(one, two)
        yield one, two


async def started(wire: Wire, tenant: str) -> tuple[Any, str]:
    """A call whose answer has one token, and its request."""
    call = wire.stub.Generate(prompt(), metadata=(("sluice-tenant", tenant),))
    task = await wire.batcher.task()
    await wire.batcher.send(task, frame(0, wire.tokens("hello")[:1]))
    await call.read()
    await call.read()  # started, and the token
    return call, task.request_id


async def test_running_requests_of_all_gateways_are_listed(pair: tuple[Wire, Wire]) -> None:
    calls = [
        await started(wire, tenant) for wire, tenant in zip(pair, ("acme", "ben"), strict=True)
    ]
    listed = await admin(pair[1]).ListRequests(pb.ListRequestsRequest(limit=10))
    assert [one.request_id for one in listed.requests] == [name for _, name in calls]
    first = listed.requests[0]
    assert (first.tenant, first.model, first.priority, first.gateway) == (
        *("acme", "small"),
        *(PRIORITY_INTERACTIVE, "gw1"),
    )
    assert (first.state, first.completion_tokens) == (pb.REQUEST_STATE_STREAMING, 1)
    assert sorted(listed.gateways) == ["gw1", "gw2"]
    only = await admin(pair[1]).ListRequests(pb.ListRequestsRequest(tenant="acme"))
    assert not only.requests
    assert [(one.tenant, one.requests, one.waiting) for one in only.counts] == [("acme", 1, 0)]
    for call, _ in calls:
        call.cancel()


async def test_an_operator_cancels_requests_at_every_gateway(pair: tuple[Wire, Wire]) -> None:
    one, two = pair
    first, _ = await started(one, "acme")
    second, name = await started(two, "acme")
    third, _ = await started(two, "ben")
    cancelled = await admin(one).CancelRequests(pb.CancelRequestsRequest(request_ids=[name]))
    assert list(cancelled.request_ids) == [name]
    code, error = await error_of(second)
    assert code is grpc.StatusCode.CANCELLED
    assert isinstance(error, Cancelled)
    assert "operator" in error.message
    cancelled = await admin(two).CancelRequests(pb.CancelRequestsRequest(tenant="acme"))
    assert len(cancelled.request_ids) == 1
    assert (await error_of(first))[0] is grpc.StatusCode.CANCELLED
    assert len(two.gateway.registry) == 1
    third.cancel()


async def test_what_cannot_be_cancelled_is_said(wire: Wire) -> None:
    for wrong, error in (
        (pb.CancelRequestsRequest(), InvalidRequest),
        (pb.CancelRequestsRequest(request_ids=["req-1"], tenant="acme"), InvalidRequest),
        (pb.CancelRequestsRequest(request_ids=["req-1"]), RequestUnknown),
    ):
        assert isinstance((await error_of(admin(wire).CancelRequests(wrong)))[1], error)
    none = await admin(wire).CancelRequests(pb.CancelRequestsRequest(tenant="acme"))
    assert not none.request_ids


async def show_workers(wire: Wire, *workers: str) -> None:
    """As a batcher does: ``workers`` of the model "small" live."""
    registry = Instruments()
    registry.observe("sluice.worker.live", lambda: [(("small", name), 1) for name in workers])
    await MetricsExchange(SERVICE_BATCHER, "b-1", registry).start(wire.batcher.client)
    await wire.batcher.client.flush()


async def test_a_worker_is_drained_and_put_back(wire: Wire) -> None:
    await show_workers(wire, "a:1/small", "b:1/small")
    drain = pb.DrainWorkerRequest(model="small", worker="a:1/small")
    changed = await admin(wire).DrainWorker(drain)
    assert (changed.others, list(changed.drained)) == (1, ["small a:1/small"])
    bucket = Bucket(jetstream.DRAINS)
    await bucket.start(wire.batcher.client)
    stored = await bucket.read(subjects.DRAINED_WORKERS, DrainRecord)
    assert stored is not None
    assert [one.worker for one in stored[0].workers] == ["a:1/small"]
    again = await admin(wire).DrainWorker(drain)
    assert list(again.drained) == ["small a:1/small"]
    drain.undo = True
    assert not (await admin(wire).DrainWorker(drain)).drained


async def with_a_drained_worker(wire: Wire) -> WireBatcher:
    """The batcher of a worker that this gateway was told to drain."""
    await show_workers(wire, "a:1/small")
    await admin(wire).DrainWorker(pb.DrainWorkerRequest(model="small", worker="a:1/small"))
    return wire.batcher


async def test_batcher_is_told_drained_workers_until_it_reports(
    pair: tuple[Wire, Wire],
) -> None:
    batcher = await with_a_drained_worker(pair[0])
    for _ in range(2):
        batcher.control.clear()
        await batcher.report("small")
        message = await batcher.heard(lambda message: message.HasField("drains_changed"))
        assert [one.worker for one in message.drains_changed.record.workers] == ["a:1/small"]
        assert message.drains_changed.revision


async def test_a_gateway_reads_what_another_one_has_told_a_batcher(
    pair: tuple[Wire, Wire],
) -> None:
    batcher = await with_a_drained_worker(pair[0])
    told = await batcher.heard(lambda message: message.HasField("drains_changed"))
    await batcher.report("small", drains_revision=told.drains_changed.revision)
    others: list[ControlMessage] = []
    until = time.monotonic() + READ_S / 2  # it is read then in any case
    while not others and time.monotonic() < until:
        await batcher.report("small")  # which seems to know none any more
        others = [one for one in batcher.control if one.gateway != told.gateway]
    assert others[0].drains_changed == told.drains_changed


async def test_a_worker_is_drained_whose_batcher_answers_late(wire: Wire) -> None:
    wire.gateway.exchange.gather_s = 0.0
    await show_workers(wire, "a:1/small")
    drain = pb.DrainWorkerRequest(model="small", worker="a:1/small")
    assert list((await admin(wire).DrainWorker(drain)).drained) == ["small a:1/small"]


async def test_a_worker_that_nobody_knows_is_not_drained(wire: Wire) -> None:
    await show_workers(wire, "a:1/small")
    wrong = pb.DrainWorkerRequest(model="small", worker="a:1/smal")
    _, error = await error_of(admin(wire).DrainWorker(wrong))
    assert isinstance(error, WorkerUnknown)
    assert "small a:1/small" in error.message


async def test_metrics_of_all_processes_are_read(pair: tuple[Wire, Wire]) -> None:
    await show_workers(pair[0], "a:1/small")
    names = ["sluice.worker.live", "sluice.requests.running"]
    async with asyncio.timeout(30):
        found: list[tuple[str, str]] = []
        while len(found) < 3:
            read = await admin(pair[0]).ReadMetrics(pb.ReadMetricsRequest(names=names))
            found = [
                (one.instance, series.name) for one in read.processes for series in one.metrics
            ]
    assert found == [("b-1", names[0]), ("gw1", names[1]), ("gw2", names[1])]
    _, error = await error_of(admin(pair[0]).ReadMetrics(pb.ReadMetricsRequest(names=["nope"])))
    assert isinstance(error, InvalidRequest)
