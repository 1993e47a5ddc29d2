"""Answers kept for equal requests, at real gateways before a real nats-server; the test plays the batcher."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.errors import InvalidRequest
from sluice.settings import CacheSettings
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import ClearAnswersRequest, GetRequestRecordRequest
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.wire import subjects
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.metrics import values
from tests.gateway.kit.tokenizer import write_model
from tests.gateway.kit.wire import (
    Wire,
    error_of,
    events_of,
    open_wire,
    prompt,
    resumed,
    text_of,
    tokens_of,
)
from tests.support.events import kinds_of

ON = CacheSettings(enabled=True)


@pytest.fixture
async def wire(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    prices = {"small": (1.0, 1.0)}
    async with open_wire(nats_url, model_folder, cache=ON, prices=prices) as wire:
        yield wire


async def compute(
    wire: Wire, request: pb.GenerateRequest, answer: str = "hello world", tenant: str = "default"
) -> list[pb.GenerateResponse]:
    """The events of a request that a worker answers."""
    call = wire.stub.Generate(request, metadata=(("sluice-tenant", tenant),))
    task = await wire.batcher.task()
    await wire.batcher.send(task, last(0, wire.tokens(answer)))
    return await events_of(call)


async def ask(
    wire: Wire, request: pb.GenerateRequest, tenant: str = "default"
) -> list[pb.GenerateResponse]:
    """The events of a request that nobody but the cache answers."""
    return await events_of(wire.stub.Generate(request, metadata=(("sluice-tenant", tenant),)))


def cached(events: list[pb.GenerateResponse]) -> bool:
    return events[-1].finished.usage.cached


async def test_an_equal_request_gets_the_same_answer_as_its_own(wire: Wire) -> None:
    once = await compute(wire, prompt())
    # How urgent it is, and how it wants to get the answer, is no part of the question.
    again = await ask(wire, prompt(priority=pb.PRIORITY_STANDARD, labels={"task": "mail"}))
    assert (cached(once), cached(again)) == (False, True)
    assert (text_of(again), tokens_of(again)) == (text_of(once), tokens_of(once))
    assert kinds_of(again) == ["started", "delta", "finished"]
    first, second = once[0].started, again[0].started
    assert first.request_id != second.request_id
    assert (first.model, first.seed, first.prompt_tokens) == (
        second.model,
        second.seed,
        second.prompt_tokens,
    )
    assert not again[-1].finished.attempts


async def test_replaced_model_computes_answers_again(nats_url: str, tmp_path: Path) -> None:
    """Also where only one number of its weights is another."""
    folder = write_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(8_000_000))
    async with open_wire(nats_url, folder, cache=ON) as wire:
        wire.gateway.in_force.prepare_s = 0.0
        before = prompt(model="small")
        await compute(wire, before, "old")
        assert cached(await ask(wire, before))
        with weights.open("r+b") as opened:
            opened.seek(5_100_000)
            opened.write(b"x")
        small, large = wire.settings.models
        models = (small.model_copy(update={"generation": 1}), large)
        await wire.ready("small", "small--1", "large")
        await wire.reload(wire.settings.model_copy(update={"models": models}))
        call = wire.stub.Generate(before)
        task = await wire.batcher.task("small--1")
        await wire.batcher.send(task, last(0, wire.tokens("new")))
        assert text_of(await events_of(call)) == "new"


async def test_the_record_and_the_counts_say_it(wire: Wire) -> None:
    once, again = await compute(wire, prompt()), await ask(wire, prompt())
    admin = AdminServiceStub(wire.channel)
    records = []
    await wire.gateway.store.flush(30)
    for events in (once, again):
        request = GetRequestRecordRequest(request_id=events[0].started.request_id)
        records.append((await admin.GetRequestRecord(request)).record)
    assert records[0].answer_key == records[1].answer_key != ""
    assert [record.cached for record in records] == [False, True]
    assert [len(record.attempts) for record in records] == [1, 0]
    assert wire.gateway.limits.spending.spent("default", 0.0) == pytest.approx(
        records[0].attempts[0].cost
    )
    assert sum(values(wire.metrics, "sluice.cached_answers").values()) == 1
    root = [span for span in wire.spans.get_finished_spans() if span.name == names.SPAN_GENERATE][
        -1
    ]
    assert root.attributes is not None
    assert root.attributes["sluice.cached"] is True


@pytest.mark.parametrize(
    "other",
    [
        prompt("hello!"),
        prompt(model="large"),
        prompt(raw_prompt=True),
        prompt(sampling=pb.SamplingParams(max_tokens=3)),
        prompt(sampling=pb.SamplingParams(stop=["x"])),
        prompt(sampling=pb.SamplingParams(logprobs=1)),
        prompt(sampling=pb.SamplingParams(seed=1)),
    ],
    ids=["prompt", "model", "raw", "max_tokens", "stop", "logprobs", "seed"],
)
async def test_what_the_answer_depends_on_makes_another_request(
    wire: Wire, other: pb.GenerateRequest
) -> None:
    await compute(wire, prompt())
    call = wire.stub.Generate(other)
    task = await wire.batcher.task(other.model)
    await wire.batcher.send(task, last(0, wire.tokens("no")))
    assert not cached(await events_of(call))


async def test_drawn_answers_are_kept_when_the_caller_names_the_seed(wire: Wire) -> None:
    drawn = pb.SamplingParams(temperature=1.0)
    for _ in range(2):
        assert not cached(await compute(wire, prompt(sampling=drawn)))
    seeded = pb.SamplingParams(temperature=1.0, seed=7)
    once = await compute(wire, prompt(sampling=seeded))
    again = await ask(wire, prompt(sampling=seeded))
    assert cached(again)
    assert again[0].started.seed == once[0].started.seed == 7


async def test_tenants_do_not_share_answers(wire: Wire) -> None:
    await compute(wire, prompt(), tenant="one")
    assert not cached(await compute(wire, prompt(), tenant="two"))


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
async def test_equal_requests_at_the_same_time_share_one_row(
    nats_url: str, model_folder: Path, count: int
) -> None:
    limit = {"max_concurrent_requests": 2 * count}
    async with open_wire(nats_url, model_folder, cache=ON, **limit) as wire:
        calls = [wire.stub.Generate(prompt()) for _ in range(count)]
        task = await wire.batcher.task()
        await wire.batcher.send(task, frame(0, wire.tokens("hello")))
        await wire.batcher.send(task, last(1, wire.tokens(" world")))
        answers = await asyncio.gather(*map(events_of, calls))
    assert len({text_of(events) for events in answers}) == 1
    assert sorted(map(cached, answers)) == [False] + [True] * (count - 1)


async def test_next_request_computes_when_the_leader_leaves(wire: Wire) -> None:
    first = wire.stub.Generate(prompt())
    task = await wire.batcher.task()
    second = wire.stub.Generate(prompt())
    await wire.until(lambda: wire.gateway.active == 2)
    first.cancel()
    again = await wire.batcher.task()
    assert again.request_id != task.request_id
    await wire.batcher.send(again, last(0, wire.tokens("hello")))
    assert not cached(await events_of(second))


async def test_an_urgent_request_does_not_wait_for_a_less_urgent_one(wire: Wire) -> None:
    slow = wire.stub.Generate(prompt(priority=pb.PRIORITY_STANDARD))
    await wire.batcher.task(priority_class="standard")
    assert not cached(await compute(wire, prompt()))
    slow.cancel()


async def test_a_caller_goes_on_behind_the_tokens_of_a_kept_answer(wire: Wire) -> None:
    answer = wire.tokens("hello world")
    await compute(wire, prompt())
    again = await ask(wire, prompt())
    request = resumed(prompt(), answer)
    assert again[1].delta.resume_token == request.resume.resume_token


async def test_gateways_share_answers_and_forget_them_together(
    wire: Wire, nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, cache=ON, gateway_id="gw2") as other:
        await other.until(lambda: other.gateway.shared.peers.alive == ["gw1"])
        await wire.until(lambda: wire.gateway.shared.peers.alive == ["gw2"])
        await compute(wire, prompt())
        await wire.gateway.shared.answers.close(30)
        assert cached(await ask(other, prompt()))
        cleared = await AdminServiceStub(wire.channel).ClearAnswers(
            ClearAnswersRequest(tenant="default", model="small")
        )
        assert not cleared.unreached_gateways
        assert not cached(await compute(other, prompt()))
        # Of another tenant, nothing is forgotten.
        await AdminServiceStub(wire.channel).ClearAnswers(ClearAnswersRequest(tenant="someone"))
        assert cached(await ask(other, prompt()))


NOT_FORGOTTEN = [
    ClearAnswersRequest(answer_key="x"),
    ClearAnswersRequest(answer_key="a.b.c", tenant="a"),
    ClearAnswersRequest(tenant="a.>"),
    ClearAnswersRequest(model="*"),
]


async def test_what_cannot_be_forgotten_is_refused(wire: Wire) -> None:
    for request_ in NOT_FORGOTTEN:
        _, error = await error_of(AdminServiceStub(wire.channel).ClearAnswers(request_))
        assert isinstance(error, InvalidRequest)


async def test_without_jetstream_a_gateway_goes_on_with_its_memory(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    await wire.batcher.jetstream.delete_stream(subjects.ANSWERS_BUCKET)
    for text in ("hello", "again"):
        await compute(wire, prompt(text))
        assert cached(await ask(wire, prompt(text)))
    await wire.gateway.shared.answers.close(30)
    assert caplog.text.count("answer cache is in memory only") == 1


async def test_only_the_first_of_several_answers_is_kept(wire: Wire) -> None:
    """The prompt is counted with that one."""
    call = wire.stub.Generate(prompt(sampling=pb.SamplingParams(n=2)))
    for task in (await wire.batcher.task(), await wire.batcher.task()):
        await wire.batcher.send(task, last(0, wire.tokens("hello")))
    ends = [one.finished.usage for one in await events_of(call) if one.HasField("finished")]
    assert not any(usage.cached for usage in ends)
    again = (await ask(wire, prompt()))[-1].finished.usage
    assert (again.cached, again.prompt_tokens) == (True, sum(one.prompt_tokens for one in ends))
