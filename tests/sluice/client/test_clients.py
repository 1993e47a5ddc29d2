"""Both clients against a real gRPC server that breaks, refuses and stalls by script."""

import asyncio
import math
from collections.abc import Sequence
from typing import Literal, Unpack

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from sluice import errors
from sluice.client import (
    Answer,
    AsyncClient,
    Client,
    ConnectionLost,
    Delta,
    Event,
    FinishReason,
    GenerateOptions,
    Message,
    Notice,
    NoticeKind,
    Prompt,
    RetryPolicy,
    Started,
)
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2 import Model
from sluice.v1.safety_pb2 import (
    SAFETY_ACTION_BLOCK,
    SAFETY_ACTION_REDACT,
    SAFETY_SEVERITY_HIGH,
    SafetyFinding,
)
from tests.support.proxy import Proxy
from tests.support.scripted import (
    Fail,
    Hold,
    ScriptedService,
    Step,
    delta,
    finished,
    started,
)

QUICK = RetryPolicy(start_tries=3, resume_tries=4, first_wait_s=0.01, wait_s_max=0.05)
Kind = Literal["async", "blocking"]
BOUND_S = 60.0


@pytest.fixture(params=["async", "blocking"])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


async def ask(
    kind: Kind,
    address: str,
    prompt: Prompt = "p",
    retries: RetryPolicy = QUICK,
    **options: Unpack[GenerateOptions],
) -> Answer:
    if kind == "async":
        async with AsyncClient(address, retries) as client:
            return await client.generate(prompt, **options).answer()
    return await asyncio.to_thread(ask_blocking, address, prompt, retries, options)


def ask_blocking(
    address: str, prompt: Prompt, retries: RetryPolicy, options: GenerateOptions
) -> Answer:
    with Client(address, retries) as client:
        return client.generate(prompt, **options).answer()


async def listen(
    kind: Kind, address: str, heard: asyncio.Event, retries: RetryPolicy = QUICK
) -> list[Event]:
    """All events of an answer; sets ``heard`` when the client has the first of its text."""
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if isinstance(event, Delta):
            loop.call_soon_threadsafe(heard.set)

    def listen_blocking() -> None:
        with (
            Client(address, retries) as client,
            client.generate("p", timeout_s=BOUND_S) as stream,
        ):
            for event in stream:
                note(event)

    loop = asyncio.get_running_loop()
    if kind == "blocking":
        await asyncio.to_thread(listen_blocking)
        return events
    async with (
        AsyncClient(address, retries) as client,
        client.generate("p", timeout_s=BOUND_S) as stream,
    ):
        async for event in stream:
            note(event)
    return events


async def models(kind: Kind, address: str) -> list[Model]:
    if kind == "async":
        async with AsyncClient(address, QUICK) as client:
            return await client.list_models()

    def blocking() -> list[Model]:
        with Client(address, QUICK) as client:
            return client.list_models()

    return await asyncio.to_thread(blocking)


WHOLE: Sequence[Step] = [started(), delta(0, "ab"), delta(2, "c"), finished()]


async def test_answer_holds_everything(kind: Kind) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        answer = await ask(kind, service.address, "hello", model="small", max_tokens=9)
    assert (answer.text, answer.token_ids) == ("abc", (100, 101, 102))
    assert (answer.request_id, answer.model, answer.tier) == ("r1", "small", "small")
    assert answer.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert (answer.timings.time_to_first_token_ms, answer.timings.total_ms) == (1.5, 4.25)
    (request,) = service.requests
    assert (request.prompt, request.model, request.sampling.max_tokens) == ("hello", "small", 9)
    assert len(request.idempotency_key) == 32


def of_answer(index: int, *events: pb.GenerateResponse) -> list[pb.GenerateResponse]:
    numbered = pb.GenerateResponse(answer_index=index)
    for event in events:
        event.MergeFrom(numbered)
    return list(events)


async def several(kind: Kind, address: str) -> list[str]:
    if kind == "async":
        async with AsyncClient(address, QUICK) as client:
            return [one.text for one in await client.generate_several("p", 2, temperature=1)]

    def ask_several() -> list[str]:
        with Client(address, QUICK) as client:
            return [one.text for one in client.generate_several("p", 2, temperature=1)]

    return await asyncio.to_thread(ask_several)


async def test_several_answers_are_asked_for_again_when_one_is_lost(kind: Kind) -> None:
    first = of_answer(0, started(), delta(0, "ab"), finished(2))
    second = of_answer(1, started(), delta(0, "cd"), finished(2))
    broken: list[Step] = [*first, second[0], Fail(errors.ShuttingDown("later"))]
    async with ScriptedService.serve([broken, [*second[:2], *first, second[2]]]) as service:
        assert await several(kind, service.address) == ["ab", "cd"]
    assert [one.sampling.n for one in service.requests] == [2, 2]
    assert len({one.idempotency_key for one in service.requests}) == 1


async def test_an_answer_that_was_not_asked_for_is_an_error(kind: Kind) -> None:
    script = of_answer(2, started())
    async with ScriptedService.serve([script]) as service:
        with pytest.raises(errors.InternalError, match="answer 2, which was not asked for"):
            await several(kind, service.address)


async def test_cut_connection_is_resumed_where_it_was(kind: Kind) -> None:
    hold = Hold()
    scripts: list[Sequence[Step]] = [
        [started(seed=3), delta(0, "ab"), hold],
        [started(request_id="r2"), delta(2, "c"), finished()],
    ]
    async with ScriptedService.serve(scripts) as service, Proxy(service.address) as relay:
        heard = asyncio.Event()
        listening = asyncio.create_task(listen(kind, relay.address, heard))
        await asyncio.wait_for(heard.wait(), BOUND_S)
        relay.reset()
        events = await listening
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "abc"
    assert [token for delta in deltas for token in delta.token_ids] == [100, 101, 102]
    notices = [event.kind for event in events if isinstance(event, Notice)]
    assert notices == [NoticeKind.RECONNECTED]
    first, second = service.requests
    assert not first.HasField("resume")
    assert second.idempotency_key == first.idempotency_key
    assert (list(second.resume.token_ids), second.resume.seed) == ([100, 101], 3)


LEAVING = Fail(errors.ShuttingDown("bye", retry_after_s=0.01))
CLOSING = Fail(code=grpc.StatusCode.CANCELLED, details="CANCELLED")
BEGUN: Sequence[Step] = [started(), delta(0, "a")]
REST: Sequence[Step] = [started(), delta(1, "bc"), finished()]
BROKEN: dict[str, list[Sequence[Step]]] = {
    "a gateway shuts down, and the next one too": [[*BEGUN, LEAVING], [LEAVING], REST],
    "the stream has no end": [BEGUN, REST],
    "a closing server cancels": [[CLOSING], [*BEGUN, CLOSING], REST],
}


@pytest.mark.parametrize("scripts", BROKEN.values(), ids=BROKEN)
async def test_broken_stream_is_resumed(kind: Kind, scripts: list[Sequence[Step]]) -> None:
    async with ScriptedService.serve(scripts) as service:
        answer = await ask(kind, service.address, timeout_s=BOUND_S)
    assert answer.text == "abc"
    assert len(service.requests) == len(scripts)
    assert list(service.requests[-1].resume.token_ids) == [100]
    assert all(service.timeouts)


WRONG = errors.InvalidRequest.of("sampling.max_tokens", "must be at least 1")
REFUSED: list[tuple[Sequence[Step], type[errors.SluiceError], str]] = [
    ([*BEGUN, Fail(errors.Overloaded("full", retry_after_s=2.5))], errors.Overloaded, "full"),
    ([Fail(WRONG)], errors.InvalidRequest, "sampling.max_tokens: must be"),
    (
        [Fail(code=grpc.StatusCode.UNIMPLEMENTED, details="no such method")],
        errors.InternalError,
        "UNIMPLEMENTED: no such method",
    ),
]


@pytest.mark.parametrize(("script", "error", "says"), REFUSED)
async def test_refused_request_is_not_repeated(
    kind: Kind, script: Sequence[Step], error: type[errors.SluiceError], says: str
) -> None:
    async with ScriptedService.serve([script]) as service:
        with pytest.raises(error, match=says) as caught:
            await ask(kind, service.address)
    assert caught.value.retry_after_s == (2.5 if error is errors.Overloaded else None)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("timeout_s", "error"),
    [
        (-1.0, errors.DeadlinePassed),
        (math.nan, errors.InvalidRequest),
        (BOUND_S, ConnectionLost),
    ],
)
async def test_call_that_reaches_no_gateway(
    kind: Kind, timeout_s: float, error: type[errors.SluiceError]
) -> None:
    with pytest.raises(error):
        await ask(kind, "127.0.0.1:1", timeout_s=timeout_s)


async def test_deadline_ends_the_call(kind: Kind) -> None:
    hold = Hold()
    async with ScriptedService.serve([[started(), hold]]) as service:
        with pytest.raises(errors.DeadlinePassed):
            await ask(kind, service.address, timeout_s=1.0)
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)


async def test_leaving_the_async_stream_cancels_the_call() -> None:
    hold = Hold()
    async with (
        ScriptedService.serve([[started(), delta(0, "a"), hold]]) as service,
        AsyncClient(service.address) as client,
    ):
        async with client.generate("p") as stream:
            assert isinstance(await anext(stream), Started)
            assert isinstance(await anext(stream), Delta)
            await asyncio.wait_for(hold.reached.wait(), BOUND_S)
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)


async def test_cancelling_the_reading_task_cancels_the_call() -> None:
    hold = Hold()
    async with (
        ScriptedService.serve([[started(), hold]]) as service,
        AsyncClient(service.address) as client,
    ):
        task = asyncio.create_task(client.generate("p").answer())
        await asyncio.wait_for(hold.reached.wait(), BOUND_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)


async def test_leaving_the_blocking_stream_cancels_the_call() -> None:
    hold = Hold()

    loop = asyncio.get_running_loop()

    def leave(address: str) -> None:
        with Client(address) as client, client.generate("p") as stream:
            assert isinstance(next(stream), Started)
            reached = asyncio.run_coroutine_threadsafe(hold.reached.wait(), loop)
            assert reached.result(BOUND_S)

    async with ScriptedService.serve([[started(), hold]]) as service:
        await asyncio.to_thread(leave, service.address)
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)


async def test_current_span_becomes_the_parent(kind: Kind) -> None:
    tracer = TracerProvider().get_tracer("test")
    async with ScriptedService.serve([WHOLE]) as service:
        with tracer.start_as_current_span("caller") as span:
            await ask(kind, service.address)
        context = span.get_span_context()
        await ask(kind, service.address)
    with_span, without = service.metadata
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    assert with_span["traceparent"].startswith(parent)
    assert "traceparent" not in without


async def test_list_of_models_survives_a_hiccup(kind: Kind) -> None:
    async with ScriptedService.serve() as service:
        service.lookup_failures = [Fail(code=grpc.StatusCode.UNAVAILABLE)]
        small, large = await models(kind, service.address)
    assert small == Model(name="small", tier="small", context_tokens=512, ready=True, slots=32)
    assert (large.name, large.ready) == ("large", False)


async def test_counting_tokens() -> None:
    async with ScriptedService.serve() as service, AsyncClient(service.address) as client:
        count = await client.count_tokens("hello", "small")
        turns = await client.count_tokens([Message("user", "hi")])
    assert (count.token_count, count.context_tokens, count.model) == (5, 512, "small")
    assert (turns.token_count, turns.model) == (2, "auto")


async def test_checking_a_text() -> None:
    async with ScriptedService.serve() as service, AsyncClient(service.address) as client:
        there = await client.check_safety("x y", {"team": "lab"})
        with Client(service.address) as blocking:
            here = await asyncio.to_thread(blocking.check_safety, "x y", {"team": "lab"})
            bad = await asyncio.to_thread(blocking.check_safety, "bad")
            counted = await asyncio.to_thread(blocking.safety_dry_run)
        assert counted == await client.safety_dry_run()
    assert (counted.policy, counted.texts, counted.changed) == ("next@1", 2, 1)
    assert there == here
    assert there.findings == [
        SafetyFinding(
            rule="pii.iban", severity=SAFETY_SEVERITY_HIGH, action=SAFETY_ACTION_REDACT, end=1
        )
    ]
    assert (there.text, there.blocked) == ("<IBAN_1> y", False)
    assert there.policy == "default@1 {'team': 'lab'}"
    assert (bad.text, bad.blocked, bad.findings[0].action) == ("", True, SAFETY_ACTION_BLOCK)


async def test_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ADDRESS", "10.0.0.1:7")
    with Client() as client:
        assert client.address == "10.0.0.1:7"
    with Client("10.0.0.2:8") as client:
        assert client.address == "10.0.0.2:8"
    monkeypatch.delenv("SLUICE_ADDRESS")
    with Client() as client:
        assert client.address == "127.0.0.1:50051"
