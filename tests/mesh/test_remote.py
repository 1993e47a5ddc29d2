"""Models that other servers compute, through a whole mesh without Triton; the servers misbehave on demand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from sluice import settings as config
from sluice.client.aio import AsyncClient
from sluice.client.answer import FinishReason, NoticeKind
from sluice.client.request import Message, Tool
from sluice.client.retry import RetryPolicy
from sluice.errors import (
    DeadlinePassed,
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    RecordUnknown,
    SluiceError,
)
from sluice.settings.mesh import HttpSettings
from sluice.settings.routing import RoutingSettings
from sluice.v1 import admin_pb2
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import kill, quick_settings
from tests.support.openai_server import (
    Fault,
    OpenAIServer,
    answer_tokens,
    answer_words,
    openai_server,
)

pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "Why?"
MANY = 60
BOUND_S = 60.0


def model(name: str, server: OpenAIServer, api: str, **settings: Any) -> config.ModelSettings:
    values = {"url": server.url, "model": server.model, "api": api}
    return config.ModelSettings.model_validate(
        {"name": name, "path": "builtin:small", "engine": "openai", "server": values, **settings}
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[OpenAIServer]:
    async with openai_server() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def limited() -> AsyncIterator[OpenAIServer]:
    async with openai_server() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(server: OpenAIServer, limited: OpenAIServer) -> AsyncIterator[Mesh]:
    async with openai_server() as frail:
        settings = quick_settings(
            model("exact", server, "tokens"),
            model("chat", server, "chat", prompt_price=1.0, answer_price=2.0),
            model("frail", frail, "chat"),
            model("limited", limited, "chat"),
            routing=RoutingSettings(default="chat", fallbacks={"frail": ("chat",)}),
            http=HttpSettings(address=None),
        )
        started = running_mesh(settings)
        mesh = await started.__aenter__()
    try:  # the server of "frail" has gone
        yield mesh
    finally:
        await started.__aexit__(None, None, None)


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: Mesh, server: OpenAIServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(mesh.address) as one:
        yield one
    server.pause_s = 0.0
    server.faults.clear()


def words(count: int) -> str:
    return "".join(answer_words([{"content": QUESTION}], count))


async def record_of(client: AsyncClient, request_id: str) -> admin_pb2.RequestRecord:
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(RecordUnknown):
                return (await client.explain(request_id)).record
            await asyncio.sleep(0.02)


async def test_the_text_of_a_server_arrives_as_it_was_sent(
    client: AsyncClient, server: OpenAIServer
) -> None:
    answer = await client.generate(QUESTION, model="chat", max_tokens=30).answer()
    assert server.requests[-1]["messages"] == [{"role": "user", "content": QUESTION}]
    assert answer.text == words(30)
    assert answer.finish_reason == FinishReason.LENGTH
    (attempt,) = (await record_of(client, answer.request_id)).attempts
    assert (attempt.server_prompt_tokens, attempt.server_completion_tokens) == (5, 30)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 30)
    assert attempt.completion_tokens > 30  # by our count
    assert attempt.cost == pytest.approx((5 * 1.0 + 30 * 2.0) / 1e6)
    stopped = await client.generate(QUESTION, model="chat", max_tokens=30, stop=["the"]).answer()
    assert stopped.text == words(30).partition("the")[0]
    assert stopped.finish_reason == FinishReason.STOP_SEQUENCE


async def test_a_parameter_that_the_server_does_not_take_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.top_k: the server of chat"):
        await client.generate(QUESTION, model="chat", top_k=3).answer()
    await client.generate(QUESTION, model="exact", top_k=3, max_tokens=2).answer()


async def test_tools_reach_the_server_and_its_calls_the_caller(
    client: AsyncClient, server: OpenAIServer
) -> None:
    tools = [Tool("look_up", "Weather.", {"type": "object", "properties": {}}), Tool("now")]
    answer = await client.generate(QUESTION, model="chat", tools=tools).answer()
    assert [one["function"]["name"] for one in server.requests[-1]["tools"]] == ["look_up", "now"]
    assert answer.finish_reason == FinishReason.TOOL_CALLS
    calls = [(one.name, json.loads(one.arguments)) for one in answer.tool_calls]
    assert calls == [("look_up", {"city": "Köln"}), ("look_up", {"city": "Rome"}), ("now", {})]
    assert answer.text == "Let me see."
    conversation = [
        Message("user", QUESTION),
        Message("assistant", answer.text, answer.tool_calls[:1]),
        Message("tool", "rain", tool_call_id=answer.tool_calls[0].id),
    ]
    await client.generate(conversation, model="chat", tools=tools, max_tokens=2).answer()
    roles = [one["role"] for one in server.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    (call,) = server.requests[-1]["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert server.requests[-1]["messages"][2]["tool_call_id"] == call["id"]


async def test_reasoning_comes_apart_from_the_answer(client: AsyncClient) -> None:
    answer = await client.generate("think", model="chat").answer()
    assert (answer.reasoning, answer.text) == ("Hm, 7? Or not?", "It is\ufffd odd. Yes.")


async def test_a_limit_beyond_the_deadline_is_said_at_once(
    client: AsyncClient, limited: OpenAIServer
) -> None:
    async def refused(timeout_s: float) -> SluiceError:
        asked = client.generate(QUESTION, model="limited", max_tokens=3, timeout_s=timeout_s)
        with pytest.raises((Overloaded, DeadlinePassed)) as caught:
            await asked.answer()
        return caught.value

    limited.faults += [Fault("status", status=429, headers={"Retry-After": "120"})]
    error = await refused(20.0)
    assert (error.reason, len(limited.requests)) == ("OVERLOADED", 1)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 100
    async with asyncio.timeout(BOUND_S):  # gateways hear of it with the next report
        while not isinstance(error := await refused(2.0), Overloaded):
            pass
    assert (error.reason, "expected of limited" in error.message) == ("EXPECTED_LATE", True)
    assert len(limited.requests) == 1


async def test_an_answer_that_is_cut_goes_on_and_no_other_notices(
    client: AsyncClient, server: OpenAIServer
) -> None:
    server.faults += [Fault("cut", after=7), Fault("rubbish", after=3), Fault("error", after=11)]
    asked = [client.generate(QUESTION, model=name, max_tokens=30) for name in ("exact", "chat") * 3]
    answers = await asyncio.gather(*(stream.answer() for stream in asked))
    prompt = next(one["prompt"] for one in server.requests if "prompt" in one)
    for answer in answers:
        if answer.model == "chat":
            assert answer.text == words(30)
        else:
            assert list(answer.token_ids) == answer_tokens(prompt, 30)


@pytest.mark.parametrize("name", ["exact", "chat"])
async def test_a_worker_killed_in_mid_answer_changes_nothing(
    client: AsyncClient, server: OpenAIServer, mesh: Mesh, name: str
) -> None:
    server.pause_s = 0.02
    killed, notices, token_ids, text = False, [], [], ""
    async with client.generate(QUESTION, model=name, max_tokens=MANY) as stream:
        async for event in stream:
            text += getattr(event, "text", "")
            token_ids += getattr(event, "token_ids", ())
            notices += [event.kind] if hasattr(event, "kind") else []
            if len(token_ids) >= 5 and not killed:
                killed = bool(kill(mesh, f"remote-{name}"))
    assert NoticeKind.RECOVERED in notices
    if name == "chat":
        assert text == words(MANY)
    else:
        prompt = next(one["prompt"] for one in server.requests if "prompt" in one)
        assert token_ids == answer_tokens(prompt, MANY)


async def test_a_lost_server_is_left_alone_after_some_failures(
    client: AsyncClient, mesh: Mesh
) -> None:
    once = RetryPolicy(start_tries=1, resume_tries=1)
    async with AsyncClient(mesh.address, retry=once) as hasty:
        with pytest.raises(ModelUnavailable) as caught:
            await hasty.generate(QUESTION, model="frail", max_tokens=3).answer()
        assert caught.value.retry_after_s
        async with asyncio.timeout(BOUND_S):
            while any(one.ready for one in await hasty.list_models() if one.name == "frail"):
                pass
    answer = await client.generate(
        QUESTION, model="frail", max_tokens=3, allow_degraded=True
    ).answer()
    assert (answer.model, answer.text) == ("chat", words(3))


@pytest.mark.long
async def test_a_mesh_starts_without_the_server_of_a_model(
    monkeypatch: pytest.MonkeyPatch, server: OpenAIServer
) -> None:
    monkeypatch.setattr("supervisor.health.REMOTE_S", 3.0)
    async with openai_server() as late:
        late.key = "not known"
        settings = quick_settings(
            model("gpt", late, "chat"),
            model("other", server, "chat"),
            routing=RoutingSettings(default="gpt", fallbacks={"gpt": ("other",)}),
        )
        async with running_mesh(settings) as mesh, AsyncClient(mesh.address) as client:
            pids = mesh.supervisor.pids
            ready = {one.name: one.ready for one in await client.list_models()}
            assert (ready["gpt"], ready["other"]) == (False, True)
            answer = await client.generate(QUESTION, max_tokens=3).answer()
            assert (answer.model, answer.route.degraded) == ("other", True)
            log = mesh.state_dir.log("remote-gpt").read_text(encoding="utf-8")
            assert "does not serve requests: the server answered 401" in log
            late.key = ""
            async with asyncio.timeout(BOUND_S):
                while not all(one.ready for one in await client.list_models()):
                    pass
            answer = await client.generate(QUESTION, max_tokens=3).answer()
            assert (answer.model, answer.route.degraded) == ("gpt", False)
            assert mesh.supervisor.pids == pids, "nothing was started again"
