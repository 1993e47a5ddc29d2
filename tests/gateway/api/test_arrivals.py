"""What a caller can make a gateway keep before its call is looked at: nothing without credentials, little with them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from gateway.admission.arrivals import LOOP_BYTES, RECEIVE_S, STREAMS_MAX, UPLOADS_MAX, Arrivals
from gateway.admission.class_limiter import ClassLimiter
from gateway.api.methods import HEALTH_BYTES_MAX, CallInterceptor
from gateway.identity.authenticator import Authenticator
from sluice import errors
from sluice.client.channel import error_of as typed_error_of
from sluice.settings import CallShares, IdentitySettings
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.wire import Wire, error_of

KEY = "0123456789abcdef"
BOUND_S = 20.0
COUNT, GENERATE = (
    "/sluice.v1.InferenceService/CountTokens",
    "/sluice.v1.InferenceService/Generate",
)
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
GET_JOB, UPLOAD = "/sluice.v1.JobService/GetJob", "/sluice.v1.JobService/UploadInput"


class Service(grpc.GenericRpcHandler):
    """Methods of all kinds; notes what reaches them."""

    def __init__(self) -> None:
        self.parsed: list[int] = []
        self.threads: list[threading.Thread] = []
        self.begun = asyncio.Semaphore(0)
        self.may_end = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == COUNT:
            return grpc.unary_unary_rpc_method_handler(
                self._answer, self._parse, pb.CountTokensResponse.SerializeToString
            )
        if details.method == GENERATE:
            return grpc.unary_stream_rpc_method_handler(
                self._wait, self._parse, pb.GenerateResponse.SerializeToString
            )
        return grpc.stream_stream_rpc_method_handler(self._echo)

    def _parse(self, payload: bytes) -> Any:
        self.parsed.append(len(payload))
        self.threads.append(threading.current_thread())
        return pb.GenerateRequest.FromString(payload)

    async def _answer(self, request: Any, context: Any) -> Any:
        return pb.CountTokensResponse(token_count=len(request.prompt))

    async def _wait(self, request: Any, context: Any) -> Any:
        self.begun.release()
        await self.may_end.wait()
        return pb.GenerateResponse()

    async def _echo(self, requests: Any, context: Any) -> None:
        self.begun.release()
        async for request in requests:
            await context.write(request)
        await self.may_end.wait()


class Door:
    """A server that asks for credentials, and calls of it by raw method."""

    def __init__(self, channel: grpc.aio.Channel, service: Service) -> None:
        self.channel, self.service = channel, service

    def call(self, method: str, tenant: str | None) -> Any:
        metadata = (("authorization", f"Bearer {KEY}"), ("sluice-tenant", str(tenant)))
        return self.channel.stream_stream(method)(
            metadata=metadata if tenant is not None else None, timeout=BOUND_S
        )

    async def refusal(self, call: Any) -> errors.SluiceError:
        with pytest.raises(grpc.RpcError) as refused:
            await call.read()
        return typed_error_of(refused.value)

    async def count(self, tenant: str, text: str) -> int:
        call = self.call(COUNT, tenant)
        await call.write(pb.GenerateRequest(prompt=text).SerializeToString())
        await call.done_writing()
        return int(pb.CountTokensResponse.FromString(await call.read()).token_count)


def new_arrivals(max_message_bytes: int = 1 << 20, receive_s: float = RECEIVE_S) -> Arrivals:
    identity = IdentitySettings(api_keys=True, mesh_key=KEY)
    limiter = ClassLimiter(64, CallShares())
    return Arrivals(Authenticator(identity), limiter, max_message_bytes, receive_s=receive_s)


@asynccontextmanager
async def opened(arrivals: Arrivals) -> AsyncIterator[Door]:
    interceptor = CallInterceptor(1 << 20, arrivals)
    server, service = grpc.aio.server(interceptors=[interceptor]), Service()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Door(channel, service)
    await server.stop(0)


async def emptied(kept: Mapping[str, Any]) -> None:
    """Waits until nothing is kept of calls that were cancelled: the server's part of one ends a moment later."""
    async with asyncio.timeout(BOUND_S):
        while kept:  # noqa: ASYNC110, a count has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("method", [COUNT, GENERATE, GET_JOB, UPLOAD])
async def test_anonymous_call_is_refused_before_its_message(method: str) -> None:
    async with opened(new_arrivals()) as door:
        call = door.call(method, None)  # sends its head alone
        assert isinstance(await door.refusal(call), errors.Unauthenticated)
        assert not door.service.parsed
        assert door.service.begun.locked()


async def test_late_messages_hold_up_their_own_tenant_alone() -> None:
    arrivals = new_arrivals(32 << 20)
    assert arrivals.receiving_max == 4
    async with opened(arrivals) as door:
        unfinished = [door.call(COUNT, "slow") for _ in range(arrivals.receiving_max)]
        # Calls of one connection come in order.
        assert await door.count("other", "x") == 1
        waits = asyncio.ensure_future(door.count("slow", "hello"))
        assert await door.count("other", "hello") == 5
        assert not waits.done()
        unfinished[0].cancel()
        assert await asyncio.wait_for(waits, BOUND_S) == 5
        for call in unfinished:
            call.cancel()
    await emptied(arrivals.arriving)


async def test_a_message_that_does_not_arrive_ends_its_call() -> None:
    async with opened(new_arrivals(receive_s=0.05)) as door:
        error = await door.refusal(door.call(COUNT, "slow"))
        assert isinstance(error, errors.DeadlinePassed)
        assert "did not arrive within 0.05 s" in str(error)
        assert isinstance(await door.refusal(door.call(GET_JOB, "slow")), errors.DeadlinePassed)


async def test_a_call_without_a_message_is_told_so() -> None:
    async with opened(new_arrivals()) as door:
        call = door.call(COUNT, "acme")
        await call.done_writing()
        error = await door.refusal(call)
        assert isinstance(error, errors.InvalidRequest)
        assert "without a message" in str(error)


async def test_the_calls_of_a_tenant_keep_no_more_than_its_bytes() -> None:
    arrivals = new_arrivals(1 << 20)
    arrivals.bytes.maximum = 1 << 20
    payload = pb.GenerateRequest(prompt="x" * 700_000).SerializeToString()
    async with opened(arrivals) as door:
        first = door.call(GENERATE, "acme")
        await first.write(payload)
        await asyncio.wait_for(door.service.begun.acquire(), BOUND_S)
        second = door.call(GENERATE, "acme")
        await second.write(payload)
        error = await door.refusal(second)
        assert isinstance(error, errors.Overloaded)
        assert "1048576 bytes" in str(error)
        assert await door.count("other", "x" * 700_000) == 700_000
        door.service.may_end.set()
        assert await first.read() == b""
        assert await first.read() is grpc.aio.EOF
        assert await door.count("acme", "x" * 700_000) == 700_000
    await emptied(arrivals.bytes.counts)


@pytest.mark.parametrize(("size", "in_loop"), [(100, True), (LOOP_BYTES, False)])
async def test_long_messages_are_parsed_in_threads(size: int, in_loop: bool) -> None:
    async with opened(new_arrivals()) as door:
        assert await door.count("acme", "x" * size) == size
        assert [thread is threading.current_thread() for thread in door.service.threads] == [
            in_loop
        ]


async def test_the_calls_about_jobs_of_a_tenant_are_counted() -> None:
    arrivals = new_arrivals(1 << 20)
    async with opened(arrivals) as door:
        watching = []
        for _ in range(STREAMS_MAX):
            call = door.call(GET_JOB, "acme")
            await call.write(b"x")
            watching.append(call)
            await asyncio.wait_for(door.service.begun.acquire(), BOUND_S)
        error = await door.refusal(door.call(GET_JOB, "acme"))
        assert isinstance(error, errors.Overloaded)
        assert f"{STREAMS_MAX} calls about jobs of your tenant" in str(error)
        other = door.call(GET_JOB, "other")
        await other.write(b"x")
        assert await other.read() == b"x"
        door.service.may_end.set()
        for call in watching:
            assert await call.read() == b"x"
            assert await call.read() is grpc.aio.EOF
    assert not arrivals.streams.counts


async def test_the_uploads_of_a_tenant_are_counted() -> None:
    async with opened(new_arrivals()) as door:
        uploads = [door.call(UPLOAD, "acme") for _ in range(UPLOADS_MAX)]
        for _ in uploads:
            await asyncio.wait_for(door.service.begun.acquire(), BOUND_S)
        error = await door.refusal(door.call(UPLOAD, "acme"))
        assert isinstance(error, errors.Overloaded)
        assert "uploads of your tenant" in str(error)
        await uploads[0].write(b"x")
        assert await uploads[0].read() == b"x"
        door.service.may_end.set()
        for call in uploads:
            await call.done_writing()


async def test_an_upload_that_does_not_go_on_ends() -> None:
    arrivals = new_arrivals(1 << 20)
    async with opened(arrivals) as door:
        call = door.call(UPLOAD, "acme")
        await call.write(b"x")
        assert await call.read() == b"x"
        arrivals.receive_s = 0.05
        await call.write(b"y")  # the next one has the new limit
        assert await call.read() == b"y"
        error = await door.refusal(call)
        assert isinstance(error, errors.DeadlinePassed)
        assert "did not arrive within 0.05 s" in str(error)
        assert not arrivals.uploads.counts


async def test_health_messages_are_small_and_parsed(wire: Wire) -> None:
    """Nobody knows who asks."""
    check: Any = wire.channel.unary_unary(CHECK)
    large = HealthCheckRequest(service="x" * HEALTH_BYTES_MAX).SerializeToString()
    _, error = await error_of(check(large))
    assert isinstance(error, errors.MessageTooLarge)
    _, error = await error_of(check(b"\xff"))
    assert isinstance(error, errors.InvalidRequest)


async def test_health_watchers_are_bounded_by_address(wire: Wire) -> None:
    wire.gateway.arrivals.watching.maximum = 8
    stub = HealthStub(wire.channel)
    watching = [stub.Watch(HealthCheckRequest()) for _ in range(8)]
    for watcher in watching:
        await asyncio.wait_for(watcher.read(), BOUND_S)
    _, error = await error_of(stub.Watch(HealthCheckRequest()))
    assert isinstance(error, errors.Overloaded)
    assert "8 health watchers of your address" in str(error)
    await stub.Check(HealthCheckRequest(), timeout=BOUND_S)  # is not one of them
    for watcher in watching:
        watcher.cancel()
    await emptied(wire.gateway.arrivals.watching.counts)


async def test_silent_health_calls_keep_no_check_waiting(wire: Wire) -> None:
    """Several times as many as may be open: the oldest end, and a check of the same address is answered."""
    arrivals = wire.gateway.arrivals
    silent: Any = wire.channel.stream_stream(CHECK)
    calls = [silent(timeout=BOUND_S) for _ in range(4 * arrivals.receiving_max)]
    error = await Door(wire.channel, Service()).refusal(calls[0])
    assert isinstance(error, errors.DeadlinePassed)
    assert "send its message at once" in str(error)
    await HealthStub(wire.channel).Check(HealthCheckRequest(), timeout=BOUND_S)
    for call in calls:
        call.cancel()
    await emptied(arrivals.without_credentials)


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_health_call_without_a_message_ends(wire: Wire, method: str) -> None:
    wire.gateway.arrivals.health_s = 0.05
    call: Any = wire.channel.stream_stream(method)(timeout=BOUND_S)
    error = await Door(wire.channel, Service()).refusal(call)
    assert isinstance(error, errors.DeadlinePassed)
    assert "was not over within 0.05 s" in str(error)
    assert not wire.gateway.arrivals.without_credentials
