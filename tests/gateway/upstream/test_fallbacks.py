"""Fallbacks for a request that meets the failure of its model, over the wire."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.client.answer import NoticeKind, notice_of
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TaskError
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import CacheSettings, ModelSettings
from sluice.settings.routing import BreakerRules
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.cascades import explained, notices
from tests.gateway.kit.http import CHAT, Reply, ask, chat, events_in
from tests.gateway.kit.wire import Opened, Wire, error_of, events_of, prompt, text_of, typed

ROUTING = {
    "default": "large",
    "fallbacks": {"large": ["small"]},
    "breaker": BreakerRules(failures=2, open_s=60.0),
}


@pytest.fixture
async def wire(opened: Opened) -> AsyncIterator[Wire]:
    async with opened(routing=ROUTING, http="127.0.0.1:0") as opened:
        yield opened


async def fail(wire: Wire, task: Task, reason: str = "MODEL_UNAVAILABLE") -> None:
    error = TaskError(reason=reason, message="the server cannot be reached")
    await wire.batcher.send(task, frame(0, end=TASK_END_FAILED, error=error))


@pytest.mark.parametrize("reason", ["MODEL_UNAVAILABLE", "ENGINE_FAILED", "OVERLOADED"])
async def test_a_fallback_answers_the_request_that_fails(wire: Wire, reason: str) -> None:
    call, first = await wire.begin(prompt("hello", model=""), "large")
    await fail(wire, first, reason)
    second = await wire.batcher.task("small")
    assert second.sampling.seed == first.sampling.seed
    events = await wire.end(call, second, "hello")
    assert text_of(events) == "hello"
    assert events[-1].finished.model == "small"
    (notice,) = notices(events)
    assert (notice.model, notice.degraded) == ("small", True)
    assert notice_of(notice).kind is NoticeKind.ESCALATED
    assert "the server cannot be reached" in notice.message
    route = (await explained(wire, first.request_id)).route
    assert (route.degraded, route.candidates[0].model) == (True, "small")
    assert "large failed before its first token" in route.reason


@pytest.mark.parametrize(
    ("model", "allow", "reason", "falls_back"),
    [
        ("", None, "MODEL_UNAVAILABLE", True),
        ("", None, "REQUEST_INVALID", False),
        ("", False, "MODEL_UNAVAILABLE", False),
        ("large", None, "MODEL_UNAVAILABLE", False),
        ("large", True, "MODEL_UNAVAILABLE", True),
    ],
)
async def test_who_gets_fallbacks(
    wire: Wire, model: str, allow: bool | None, reason: str, falls_back: bool
) -> None:
    chosen: dict[str, Any] = {} if allow is None else {"allow_degraded": allow}
    call = wire.stub.Generate(prompt("hello", model=model, **chosen))
    await fail(wire, await wire.batcher.task("large"), reason)
    if not falls_back:
        assert (await error_of(call))[1].reason == reason
        return
    await wire.batcher.send(await wire.batcher.task("small"), last(0, wire.tokens("hello")))
    assert (await events_of(call))[-1].finished.model == "small"


async def test_a_shown_answer_is_not_replaced(wire: Wire) -> None:
    call, task = await wire.begin(prompt("hello", model=""), "large")
    await wire.batcher.send(task, frame(0, wire.tokens("hello")))
    error = TaskError(reason="ENGINE_FAILED", message="it broke")
    count = len(wire.tokens("hello"))
    await wire.batcher.send(task, frame(count, end=TASK_END_FAILED, error=error))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events_of(call)
    assert typed(caught.value).reason == "ENGINE_FAILED"


async def test_failures_count_for_the_breaker_at_once(wire: Wire) -> None:
    for is_answered in (True, False):
        call = wire.stub.Generate(prompt("hello", model=""))
        await fail(wire, await wire.batcher.task("large"))
        task = await wire.batcher.task("small")
        if is_answered:  # which is no success of the model that failed
            await wire.end(call, task, "hello")
    _, error = await error_of(wire.stub.Generate(prompt("hello", model="large")))
    assert "circuit breaker is open" in error.message
    call.cancel()


async def test_a_fallback_without_room_is_passed_over(opened: Opened, model_folder: Path) -> None:
    short = ModelSettings(name="short", tier="s", path=str(model_folder), context_tokens=64)
    routing = {"default": "large", "fallbacks": {"large": ["short", "small"]}}
    async with opened(routing=routing, more_models=[short]) as wire:
        call = wire.stub.Generate(prompt("x " * 60, model=""))
        await fail(wire, await wire.batcher.task("large"))
        await wire.batcher.send(await wire.batcher.task("small"), last(0, wire.tokens("hello")))
        assert (await events_of(call))[-1].finished.model == "small"


async def test_a_degraded_answer_is_not_kept(opened: Opened) -> None:
    cache = CacheSettings(enabled=True)
    sampling = pb.SamplingParams(seed=1)
    async with opened(routing=ROUTING, cache=cache) as wire:
        for failing in (True, False):
            call, task = await wire.begin(prompt("hello", model="", sampling=sampling), "large")
            if failing:
                await fail(wire, task)
                task = await wire.batcher.task("small")
            await wire.end(call, task, "hello")


async def answered(wire: Wire, body: dict[str, Any], path: str = CHAT, **headers: str) -> Reply:
    """The reply to a request whose large model fails, and whose fallback answers."""
    asking = asyncio.create_task(ask(wire.http, path, body, **headers))
    await fail(wire, await wire.batcher.task("large"))
    await wire.batcher.send(await wire.batcher.task("small"), last(0, wire.tokens("hello")))
    return await asking


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("asked", "headers"),
    [
        ({"model": "auto"}, {}),
        ({"allow_degraded": True}, {}),
        ({}, {"x_sluice_allow_degraded": "true"}),
    ],
    ids=["auto", "field", "header"],
)
async def test_http_says_that_an_answer_is_degraded(
    wire: Wire, stream: bool, asked: dict[str, Any], headers: dict[str, str]
) -> None:
    body = {**chat(), "stream": stream, "model": "large", **asked}
    reply = await answered(wire, body, **headers)
    assert (reply.status, reply.headers["x-sluice-degraded"]) == (200, "true")
    objects = events_in(reply.body)[:-1] if stream else [reply.json]
    assert objects
    assert all((one["degraded"], one["model"]) == (True, "small") for one in objects)


async def test_http_names_a_wrong_switch(wire: Wire) -> None:
    reply = await ask(wire.http, CHAT, chat(), x_sluice_allow_degraded="maybe")
    assert (reply.status, reply.error["param"]) == (400, "x-sluice-allow-degraded")
    reply = await ask(wire.http, CHAT, {**chat(), "allow_degraded": "maybe"})
    assert (reply.status, reply.error["param"]) == (400, "allow_degraded")
