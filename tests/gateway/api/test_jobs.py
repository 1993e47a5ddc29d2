"""What a gateway does for `jobs`: it answers items, many a call, and passes calls of JobService on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from gateway.admission.arrivals import RECEIVE_S, Arrivals
from gateway.admission.class_limiter import BulkPacer, ClassLimiter
from gateway.admission.request_context import ItemCall
from gateway.api.job_forwarder import MESSAGE_BYTES_MAX, JobForwarder
from gateway.api.methods import CallInterceptor
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import Caller
from sluice import errors
from sluice.client.channel import error_of as typed_error_of
from sluice.errors import from_status
from sluice.internal.v1.control_pb2 import ClassReport
from sluice.internal.v1.items_pb2 import FindTokenEndsRequest, RunRequest, RunResponse
from sluice.internal.v1.items_pb2_grpc import ItemsServiceStub
from sluice.settings import CallShares, IdentitySettings, JobsSettings
from sluice.startup import free_port
from sluice.telemetry import names
from sluice.v1 import jobs_pb2
from sluice.v1.inference_pb2 import FINISH_REASON_STOP, PRIORITY_BULK, EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2_grpc import (
    JobServiceServicer,
    JobServiceStub,
    add_JobServiceServicer_to_server,
)
from sluice.wire.job_calls import is_signed
from tests.gateway.kit.batcher import BOUND_S, TIMINGS, last
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Wire


def item(number: int, prompt: str, model: str = "small") -> RunRequest:
    request = GenerateRequest(
        prompt=prompt, model=model, priority=PRIORITY_BULK, idempotency_key=f"item-{number}"
    )
    request.idempotency_key_generated = True
    return RunRequest(id=number, request=request)


@pytest.mark.wire(prices={"small": (1e6, 2e6)})
async def test_items_of_one_call_are_answered_as_they_end(wire: Wire) -> None:
    call: Any = ItemsServiceStub(wire.channel).Run(metadata=(("sluice-tenant", "acme"),))
    for number in (1, 2):
        await call.write(item(number, f"hello {number}"))
    tasks = [await wire.batcher.task(priority_class="bulk") for _ in range(2)]
    assert {task.tenant for task in tasks} == {"acme"}
    answered: list[RunResponse] = []
    for task in reversed(tasks):
        await wire.batcher.send(task, last(0, wire.tokens("world")))
        answered.append(await asyncio.wait_for(call.read(), BOUND_S))
    await call.write(item(3, "hello", model="none"))
    refused = await asyncio.wait_for(call.read(), BOUND_S)
    await call.done_writing()

    assert await call.read() is grpc.aio.EOF
    assert {one.id for one in answered} == {1, 2}
    first = answered[0]
    assert first.answer.text == "world"
    assert first.answer.finished.reason == FINISH_REASON_STOP
    usage = first.answer.finished.usage
    assert first.cost == usage.prompt_tokens + 2 * usage.completion_tokens
    error = from_status(status_pb2.Status.FromString(refused.error))
    assert isinstance(error, errors.UnknownModel)


async def test_item_reports_what_it_took_of_a_worker(wire: Wire) -> None:
    call: Any = ItemsServiceStub(wire.channel).Run(metadata=(("sluice-tenant", "acme"),))
    await call.write(item(1, "hello"))
    task = await wire.batcher.task(priority_class="bulk")
    whole = last(0, wire.tokens("world"))
    whole.final.batch.worker, whole.final.batch.padding_share = "w1", 0.5
    await wire.batcher.send(task, whole)
    answered = await asyncio.wait_for(call.read(), BOUND_S)
    await call.done_writing()
    (work,) = answered.work
    tokens = len(task.prompt_token_ids)
    assert (work.worker, work.tokens, work.cells) == ("w1", tokens, 2 * tokens)
    assert work.computing_ms == TIMINGS.prefill_ms + TIMINGS.decode_ms


async def test_items_that_come_together_are_answered_together(wire: Wire) -> None:
    call: Any = ItemsServiceStub(wire.channel).Run()
    first, *more = (item(number, f"hello {number}") for number in range(1, 7))
    first.more.extend(more)
    await call.write(first)
    tasks = [await wire.batcher.task(priority_class="bulk") for _ in range(6)]
    frames = [last(0, wire.tokens(f"world {number}")) for number in range(6)]
    for task, frame in zip(tasks, frames, strict=True):
        frame.request_id, frame.attempt = task.request_id, task.attempt
    await wire.batcher.send(tasks[0], *frames)
    messages, answered = 0, list[RunResponse]()
    while len(answered) < 6:
        message = await asyncio.wait_for(call.read(), BOUND_S)
        messages += 1
        answered += (message, *message.more)
    assert messages < 6
    assert {one.id for one in answered} == set(range(1, 7))
    assert {one.answer.text for one in answered} == {f"world {number}" for number in range(6)}
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_an_item_whose_time_is_over_is_not_begun(wire: Wire) -> None:
    call: Any = ItemsServiceStub(wire.channel).Run()
    embed = EmbedRequest(texts=["hello"])
    for late in (item(1, "hello"), RunRequest(id=2, embed=embed)):
        late.timeout.SetInParent()
        await call.write(late)
        refused = await asyncio.wait_for(call.read(), BOUND_S)
        error = from_status(status_pb2.Status.FromString(refused.error))
        assert isinstance(error, errors.DeadlinePassed)
        assert "before the request arrived" in error.message
    await call.done_writing()


async def test_items_in_no_worker_are_counted_by_class(wire: Wire) -> None:
    """What is being prepared, and what waits for a batcher with room, is what an autoscaler looks at."""
    limiter = wire.gateway.limiter

    def pending() -> tuple[float, float]:
        prepared = values(wire.metrics, "sluice.requests.preparing")
        waiting = values(wire.metrics, "sluice.room.waiting")
        bulk = (names.PRIORITY_CLASS, "bulk")
        counted = [
            sum(count for labels, count in metric.items() if bulk in labels)
            for metric in (prepared, waiting)
        ]
        return counted[0], counted[1]

    room = [ClassReport(priority_class="bulk", room_rows=2, room_bytes=1 << 20)]
    await wire.batcher.report("small", "large", classes=room)
    call: Any = ItemsServiceStub(wire.channel).Run(metadata=(("sluice-tenant", "acme"),))
    async with limiter.preparing("bulk", "other"), limiter.preparing("bulk", "other"):
        for number in range(10):
            await call.write(item(number, f"hello {number}"))
        await wire.until(lambda: pending() == (2 + 10, 0))
    tasks = [await wire.batcher.task(priority_class="bulk") for _ in range(2)]
    await wire.until(lambda: pending() == (0, 8))
    await wire.batcher.send(tasks[0], last(0, wire.tokens("world")))
    await wire.until(lambda: pending() == (0, 7))
    call.cancel()
    await wire.until(lambda: pending() == (0, 0))


@pytest.mark.wire(max_concurrent_requests=4)
async def test_items_above_the_tenants_limit_are_not_read(wire: Wire) -> None:
    call: Any = ItemsServiceStub(wire.channel).Run()
    for number in range(3):
        await call.write(item(number, "hello"))
    await call.done_writing()
    for _ in range(3):  # Of two places for bulk one is left to other tenants.
        task = await wire.batcher.task(priority_class="bulk")
        await wire.batcher.send(task, last(0, wire.tokens("world")))
        answered = await asyncio.wait_for(call.read(), BOUND_S)
        assert answered.answer.text == "world", answered
    assert await call.read() is grpc.aio.EOF


async def test_bulk_calls_that_wait_do_not_end_a_call_of_items(wire: Wire) -> None:
    wire.gateway.limiter.pacer = BulkPacer(waiting_max=0)
    call: Any = ItemsServiceStub(wire.channel).Run()
    for number in range(2):
        await call.write(item(number, f"hello {number}"))
    await call.done_writing()
    for _ in range(2):
        task = await wire.batcher.task(priority_class="bulk")
        await wire.batcher.send(task, last(0, wire.tokens("world")))
        answered = await asyncio.wait_for(call.read(), BOUND_S)
        assert answered.answer.text == "world", answered


async def test_the_ends_of_tokens_are_those_of_the_model(wire: Wire) -> None:
    stub: Any = ItemsServiceStub(wire.channel)
    found = await stub.FindTokenEnds(FindTokenEndsRequest(model="auto", text="hello world"))
    assert found.ends[-1] == len("hello world")
    with pytest.raises(grpc.RpcError) as refused:
        await stub.FindTokenEnds(FindTokenEndsRequest(model="none", text="hello"))
    assert isinstance(typed_error_of(refused.value), errors.UnknownModel)


async def test_a_call_that_ends_drops_its_items(wire: Wire) -> None:
    call: Any = ItemsServiceStub(wire.channel).Run()
    await call.write(item(1, "hello"))
    task = await wire.batcher.task(priority_class="bulk")
    await wire.batcher.hold(task)
    call.cancel()

    assert await wire.batcher.cancelled(task)
    await wire.forgotten(task)


class Jobs(JobServiceServicer):
    """Counts bytes, and knows no job."""

    async def UploadInput(self, requests: Any, context: Any) -> jobs_pb2.UploadInputResponse:
        size = 0
        async for request in requests:
            size += len(request.data)
        metadata = dict(context.invocation_metadata())
        assert "authorization" not in metadata
        assert is_signed(metadata, "the key of the mesh")
        tenant = metadata["sluice-tenant"]
        return jobs_pb2.UploadInputResponse(upload_id=tenant, size_bytes=size)

    async def GetJob(self, request: Any, context: Any) -> jobs_pb2.GetJobResponse:
        status = errors.JobUnknown("there is none").to_status()
        details = (("grpc-status-details-bin", status.SerializeToString()),)
        raise await context.abort(grpc.StatusCode.NOT_FOUND, status.message, details)


@asynccontextmanager
async def forwarding(
    address: str | None = None, receive_s: float = RECEIVE_S
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that passes calls on to ``address``, by default a process that serves `Jobs`."""
    jobs = grpc.aio.server()
    if address is None:
        add_JobServiceServicer_to_server(Jobs(), jobs)
        address = f"127.0.0.1:{jobs.add_insecure_port('127.0.0.1:0')}"
        await jobs.start()
    forwarder = JobForwarder(JobsSettings(address=address), lambda: "the key of the mesh")
    authenticator, limiter = Authenticator(IdentitySettings()), ClassLimiter(8, CallShares())
    arrivals = Arrivals(authenticator, limiter, 1 << 20, receive_s=receive_s)
    server = grpc.aio.server(interceptors=[CallInterceptor(1 << 20, arrivals)])
    server.add_generic_rpc_handlers((forwarder,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await forwarder.close()
    await server.stop(0)
    await jobs.stop(0)


async def refusal_of(call: Any) -> errors.SluiceError | None:
    with pytest.raises(grpc.RpcError) as refused:
        await call
    return typed_error_of(refused.value)


async def test_calls_of_jobs_are_passed_on_with_tenant_and_errors() -> None:
    async with forwarding() as channel:
        stub: Any = JobServiceStub(channel)
        pieces = [jobs_pb2.UploadInputRequest(data=b"x" * 1000) for _ in range(5)]
        stored = await stub.UploadInput(iter(pieces), metadata=(("sluice-tenant", "acme"),))
        assert (stored.upload_id, stored.size_bytes) == ("acme", 5000)
        unknown = await refusal_of(stub.GetJob(jobs_pb2.GetJobRequest(id="job-1")))
        assert isinstance(unknown, errors.JobUnknown)


async def test_messages_about_jobs_are_bounded() -> None:
    long = "x" * MESSAGE_BYTES_MAX
    async with forwarding() as channel:
        stub: Any = JobServiceStub(channel)
        for call in (
            stub.CreateJob(jobs_pb2.CreateJobRequest(idempotency_key=long)),
            stub.UploadInput(iter([jobs_pb2.UploadInputRequest(data=long.encode())])),
        ):
            assert isinstance(await refusal_of(call), errors.MessageTooLarge)


@pytest.mark.parametrize(
    ("enabled", "kind"), [(False, errors.JobsDisabled), (True, errors.TransportUnavailable)]
)
async def test_without_a_process_of_jobs_the_error_says_so(
    enabled: bool, kind: type[errors.SluiceError]
) -> None:
    async with forwarding(f"127.0.0.1:{free_port() if enabled else 0}") as channel:
        stub: Any = JobServiceStub(channel)
        assert isinstance(await refusal_of(stub.GetJob(jobs_pb2.GetJobRequest(id="job-1"))), kind)


async def test_a_request_that_does_not_arrive_ends_the_call() -> None:
    async with forwarding(receive_s=0.05) as channel:
        call = channel.stream_stream("/sluice.v1.JobService/GetJob")(timeout=BOUND_S)
        assert isinstance(await refusal_of(call.read()), errors.DeadlinePassed)


@pytest.mark.parametrize("trace", ["é", "00-\t-", "x" * 55, "0" * 5000])
async def test_a_trace_context_that_is_none_is_not_passed_on(trace: str) -> None:
    forwarder = JobForwarder(JobsSettings(address="127.0.0.1:1"), lambda: None)
    acme = Caller("acme")
    call = ItemCall(acme, {"traceparent": trace}, None)
    assert forwarder.metadata(call) == (("sluice-tenant", "acme"),)
    valid = f"00-{'1' * 32}-{'2' * 16}-01"
    call = ItemCall(acme, {"traceparent": valid}, None)
    assert forwarder.metadata(call)[-1] == ("traceparent", valid)
