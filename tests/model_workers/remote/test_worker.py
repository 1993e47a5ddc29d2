"""A worker between a batcher's channel and a server that misbehaves; both are real, over gRPC and HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate
from threading import Condition
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer

from batcher.workers.client import Reports, WorkerClient
from model_workers.engine.protocol import SequenceEnd, SequenceStep, TokenLogprobs
from model_workers.engine.sequences import SequenceLimits
from model_workers.remote import client as client_module
from model_workers.remote.api import ServerApi, find_text_tokens
from model_workers.remote.client import ServerClient, proxy_of
from model_workers.remote.engine import RemoteEngine, joined
from model_workers.remote.server import start_server
from model_workers.worker import Worker, notify
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.settings import ModelSettings
from sluice.settings.remote import ServerSettings
from sluice.startup import free_port
from tests.support.openai_server import (
    WAIT_S,
    Fault,
    OpenAIServer,
    answer_tokens,
    answer_words,
    openai_server,
)
from tests.support.sequences import batch, cancel_tasks, open_channel, wire_row
from tests.support.settings import tuned

PROMPT = [5, 6, 7]
SLOTS = 2


class Channel:
    """A batcher's channel to the worker."""

    def __init__(self, engine: RemoteEngine, client: WorkerClient) -> None:
        self.engine = engine
        self.frames: list[frame_pb2.Frame] = []
        self.load = worker_pb2.WorkerLoad()
        self.ready = False
        self._failure: Exception | None = None
        self._client = client
        self._call = client.stream()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Reads until it is cancelled; when it fails, so does what waits for it."""
        try:
            await self._read()
        except Exception as error:
            async with self._changed:
                self._failure = error
                self._changed.notify_all()

    async def _read(self) -> None:
        await self.send(open_channel(epoch=0), ends=True)
        reports = Reports(self._call)
        while True:
            report = await reports.next()
            async with self._changed:
                self.frames += report.frames
                self.load, self.ready = report.load, report.ready
                self._changed.notify_all()

    async def send(self, request: worker_pb2.WorkerRequest, *, ends: bool = False) -> None:
        await self._client.write(self._call, request, ends=ends)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: condition() or self._failure)
            if not condition():
                raise AssertionError("the channel has ended") from self._failure

    async def ask(self, *names: str, **row: Any) -> None:
        rows = [wire_row(name, **{"prompt": PROMPT, "max_tokens": 12, **row}) for name in names]
        await self.send(batch(rows))

    async def ended(self, name: str = "r") -> frame_pb2.Final:
        def finals() -> list[frame_pb2.Final]:
            found = [frame for frame in self.frames if frame.request_id == name]
            return [frame.final for frame in found if frame.HasField("final")]

        await self.until(finals)
        return finals()[0]

    def tokens(self, name: str = "r") -> list[int]:
        return [t for frame in self.frames if frame.request_id == name for t in frame.token_ids]

    def text(self, name: str = "r") -> str:
        tokens = self.engine.client.api.tokens
        assert tokens is not None
        return tokens.decode(self.tokens(name))


def model(server: OpenAIServer, api: str, **settings: Any) -> ModelSettings:
    values = {"url": server.url, "model": server.model, "api": api, **settings}
    return ModelSettings.model_validate(
        {
            "name": "gpt",
            "path": "builtin:small",
            "engine": "openai",
            "server": tuned(ServerSettings, **values),
        }
    )


@asynccontextmanager
async def running(
    server: OpenAIServer, api: str = "tokens", alone: bool = True, **settings: Any
) -> AsyncIterator[Channel]:
    """A worker of ``server``, and a channel to it."""
    one = model(server, api, **settings)
    assert one.server is not None
    engine: RemoteEngine
    spoken = ServerApi(one.server, find_text_tokens(one), 1000)
    async with ServerClient(spoken, server.url, lambda: engine.gate_changed()) as client:
        limits = SequenceLimits(SLOTS, 32, 1000, 0)
        loop = asyncio.get_running_loop()
        changed = Condition()
        engine = RemoteEngine(client, limits, alone, loop, partial(notify, changed))
        worker = Worker("gpt", engine, NoOpTracer(), pytest.fail, changed)
        worker.start()
        address = f"127.0.0.1:{free_port()}"
        grpc_server = await start_server(worker, address)
        batcher = WorkerClient(address, "gpt")
        channel = Channel(engine, batcher)
        reading = asyncio.create_task(channel.run())
        try:
            await channel.until(lambda: channel.ready)
            yield channel
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await batcher.close()
            await asyncio.to_thread(worker.stop)
            await grpc_server.stop(None)


@pytest.fixture
async def server() -> AsyncIterator[OpenAIServer]:
    async with openai_server() as one:
        yield one


def conversation(channel: Channel, text: str = "hi") -> list[int]:
    tokens = channel.engine.client.api.tokens
    assert tokens is not None
    return tokens.encode(text)


def words(count: int, text: str = "hi") -> str:
    return "".join(answer_words([{"content": text}], count))


async def test_token_ids_both_ways(server: OpenAIServer) -> None:
    async with running(server) as channel:
        await channel.ask("r")
        final = await channel.ended()
        assert channel.tokens() == answer_tokens(PROMPT, 12)
        assert final.end == frame_pb2.TASK_END_LENGTH
        assert final.cached_prompt_tokens == 3
        billed = final.server_tokens
        assert (billed.prompt_tokens, billed.completion_tokens) == (5, 12)
        sizes = [len(f.token_ids) for f in channel.frames if f.token_ids]
        starts = [f.start_index for f in channel.frames if f.token_ids]
        assert starts == [0, *accumulate(sizes[:-1])]  # those that wait for the sender go together
        await channel.ask("again", produced=answer_tokens(PROMPT, 5), attempt=1)
        assert not (await channel.ended("again")).HasField("server_tokens")
        assert channel.tokens("again") == answer_tokens(PROMPT, 12)[5:]


async def test_the_server_gets_the_trace_context_of_the_row(server: OpenAIServer) -> None:
    traceparent = f"00-{'1' * 32}-{'2' * 16}-00"
    async with running(server) as channel:
        await channel.ask("r", traceparent=traceparent)
        await channel.ended()
        await channel.ask("s")
        await channel.ended("s")
        assert server.traceparents == [traceparent, ""]


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_text_comes_back_as_the_server_sent_it(server: OpenAIServer, api: str) -> None:
    async with running(server, api) as channel:
        prompt = conversation(channel)
        await channel.ask("r", prompt=prompt)
        await channel.ended()
        body = server.requests[0]
        if api == "chat":
            assert body["messages"] == [{"role": "user", "content": "hi"}]
            assert channel.text() == words(12)
        else:
            assert body["prompt"] == prompt
            assert channel.text()


async def test_begun_conversation_continues_after_the_same_text(
    server: OpenAIServer,
) -> None:
    async with running(server, "chat") as channel:
        tokens = channel.engine.client.api.tokens
        assert tokens is not None
        # Ends within a piece of the server's.
        known = words(12)[:9]
        produced = tokens.encode(known)
        await channel.ask("r", prompt=conversation(channel), produced=produced, max_tokens=40)
        await channel.ended()
        assert known + channel.text() == words(40)
        assert channel.frames[0].start_index == len(produced)


async def test_reasoning_is_marked_and_known_again(server: OpenAIServer) -> None:
    marked = "\x0eHm, 7?\x0fIt is\ufffd odd.\x0e Or not?\x0f Yes."
    async with running(server, "chat") as channel:
        tokens = channel.engine.client.api.tokens
        assert tokens is not None
        prompt = conversation(channel, "think")
        await channel.ask("r", prompt=prompt)
        await channel.ended()
        assert channel.text() == marked
        produced = tokens.encode(marked[:12])
        await channel.ask("again", prompt=prompt, produced=produced)
        await channel.ended("again")
        assert marked[:12] + tokens.decode(channel.tokens("again")) == marked


async def test_log_probabilities_are_those_of_the_servers_tokens(server: OpenAIServer) -> None:
    async with running(server, "chat") as channel:
        for name, text in (("r", "hi"), ("mute", "mute")):
            row = wire_row(name, prompt=conversation(channel, text), max_tokens=4)
            row.task.sampling.logprobs, row.task.sampling.top_logprobs = True, 2
            await channel.send(batch([row]))
            await channel.ended(name)
        assert (server.requests[0]["logprobs"], server.requests[0]["top_logprobs"]) == (True, 2)
        entries = [one for f in channel.frames if f.request_id == "r" for one in f.logprobs]
        assert len(entries) == len(channel.tokens())
        assert all(one.HasField("text") for one in entries)
        assert "".join(one.text for one in entries) == channel.text() == words(4)
        shown = [one for one in entries if one.text]
        assert all(one.logprob == 0 for one in entries if not one.text)
        # A token that ends inside a character is counted with the next.
        sent = sum(min(2, len(w.encode())) for w in answer_words([{"content": "hi"}], 4))
        assert sum(one.logprob for one in entries) == pytest.approx(-0.25 * sent)
        assert {tuple(one.top_texts) for one in shown} == {("t0", "t1"), ()}
        final = await channel.ended("mute")
        assert (final.end, final.error.reason) == (frame_pb2.TASK_END_FAILED, "REQUEST_INVALID")
        assert "parameters.logprobs" in final.error.message


async def test_another_answer_than_the_caller_has_begun_to_read_fails(server: OpenAIServer) -> None:
    async with running(server, "chat") as channel:
        tokens = channel.engine.client.api.tokens
        assert tokens is not None
        produced = tokens.encode("nothing like it")
        await channel.ask("r", prompt=conversation(channel), produced=produced, max_tokens=99)
        final = await channel.ended()
        assert final.end == frame_pb2.TASK_END_FAILED
        assert "another one" in final.error.message
        assert not channel.tokens()


async def test_a_cancel_closes_the_request_at_once(server: OpenAIServer) -> None:
    server.faults.append(Fault("stall", after=2))
    async with running(server) as channel:
        await channel.ask("r")
        await channel.until(lambda: len(channel.tokens()) == 2)
        await channel.send(cancel_tasks("r"))
        await server.until(lambda: server.gone == 1)
        assert (await channel.ended()).end == frame_pb2.TASK_END_CANCELLED


async def test_a_deadline_closes_the_request(server: OpenAIServer) -> None:
    server.faults.append(Fault("stall", after=2))
    async with running(server) as channel:
        await channel.ask("r", timeout_ms=1000)
        assert (await channel.ended()).end == frame_pb2.TASK_END_DEADLINE
        await server.until(lambda: server.gone == 1)


def test_events_of_one_step_are_one_report() -> None:
    first = SequenceStep("r", "b", 0, 0, (1, 2), (TokenLogprobs(-1.0),) * 2)
    second = SequenceStep("r", "b", 0, 0, (3,), (TokenLogprobs(-2.0),))
    end = SequenceStep("r", "b", 0, 0, end=SequenceEnd.STOP, server_tokens=(4, 3))
    both = joined(joined(first, second), end)
    assert (both.token_ids, both.end, both.server_tokens) == ((1, 2, 3), SequenceEnd.STOP, (4, 3))
    assert [one.logprob for one in both.logprobs] == [-1.0, -1.0, -2.0]
    assert joined(both, SequenceStep("r", "b", 0, 0, end=SequenceEnd.CANCELLED)) is both


async def test_a_channel_that_is_gone_ends_its_requests(server: OpenAIServer) -> None:
    server.faults.append(Fault("stall", after=2))
    async with running(server) as channel:
        await channel.ask("r")
        await channel.until(lambda: len(channel.tokens()) == 2)
        channel._call.cancel()
        await server.until(lambda: server.gone == 1)


async def test_no_more_requests_at_the_same_time_than_slots(server: OpenAIServer) -> None:
    server.pause_s = 0.005
    names = [f"r{i}" for i in range(5)]
    async with running(server) as channel:
        await channel.ask(*names)
        for name in names:
            await channel.ended(name)
            assert channel.tokens(name) == answer_tokens(PROMPT, 12)
        assert server.most == SLOTS
        assert channel.load.slots == SLOTS


RETRIED = [
    Fault("status", status=500),
    Fault("status", status=503, headers={"Retry-After": "0.05"}),
    Fault("status", status=429, headers={"retry-after-ms": "50"}),
    Fault("rubbish"),
    Fault("error"),
    Fault("cut"),
    Fault("silence"),
]


@pytest.mark.parametrize("fault", RETRIED, ids=str)
async def test_what_fails_before_the_first_token_is_sent_again(
    server: OpenAIServer, fault: Fault
) -> None:
    server.faults.append(fault)
    async with running(server) as channel:
        await channel.ask("r")
        assert (await channel.ended()).end == frame_pb2.TASK_END_LENGTH
        assert channel.tokens() == answer_tokens(PROMPT, 12)
        assert len(server.requests) == 2


@pytest.mark.parametrize("kind", ["rubbish", "endless", "error", "cut", "silence"])
async def test_what_fails_later_is_returned_with_its_tokens(
    server: OpenAIServer, kind: Any
) -> None:
    server.faults.append(Fault(kind, after=5))
    async with running(server) as channel:
        await channel.ask("r", "other")
        ends = {name: (await channel.ended(name)).end for name in ("r", "other")}
        (failed,) = (name for name, end in ends.items() if end == frame_pb2.TASK_END_RETURNED)
        assert channel.tokens(failed) == answer_tokens(PROMPT, 5)
        (whole,) = ends.keys() - {failed}
        assert channel.tokens(whole) == answer_tokens(PROMPT, 12)
        assert len(server.requests) == 2


async def test_a_server_that_stalls_has_failed(server: OpenAIServer) -> None:
    server.faults.append(Fault("stall", after=1))
    async with running(server, stall_s=0.1) as channel:
        await channel.ask("r")
        final = await channel.ended()
        assert final.end == frame_pb2.TASK_END_RETURNED
        assert "said nothing for 0.1 s" in final.error.message


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("status", status=500), "the server answered 500 (oops)"),
        (Fault("rubbish"), "none of its API"),
        (Fault("error"), "broke the answer off"),
        (Fault("cut"), "broke"),
        (Fault("silence"), "cut the answer off"),
    ],
)
async def test_persistent_server_failure_fails_or_returns_the_task(
    server: OpenAIServer, alone: bool, fault: Fault, said: str
) -> None:
    server.faults += [fault] * client_module.TRIES
    async with running(server, alone=alone) as channel:
        await channel.ask("r")
        final = await channel.ended()
        end = frame_pb2.TASK_END_FAILED if alone else frame_pb2.TASK_END_RETURNED
        assert (final.end, final.error.reason) == (end, "MODEL_UNAVAILABLE")
        assert said in final.error.message
        assert len(server.requests) == client_module.TRIES
        await channel.ask("next")
        await channel.ended("next")
        assert channel.tokens("next") == answer_tokens(PROMPT, 12)


async def test_a_server_that_is_not_there_fails_the_row() -> None:
    nobody = OpenAIServer(url=f"http://127.0.0.1:{free_port()}/v1")
    async with running(nobody) as channel:
        await channel.ask("r")
        final = await channel.ended()
        assert final.error.reason == "MODEL_UNAVAILABLE"
        assert final.error.message == "the server cannot be reached"


async def test_a_request_that_the_server_refuses_is_not_repeated(server: OpenAIServer) -> None:
    server.faults.append(Fault("status", status=400))
    async with running(server) as channel:
        await channel.ask("r")
        final = await channel.ended()
        assert (final.end, final.error.reason) == (frame_pb2.TASK_END_FAILED, "REQUEST_INVALID")
        assert "you said" not in final.error.message
        assert len(server.requests) == 1


async def test_a_rate_limit_makes_the_worker_full_until_it_is_over(server: OpenAIServer) -> None:
    server.headers = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "2s"}
    async with running(server) as channel:
        await channel.ask("r")
        await channel.until(lambda: channel.load.running == SLOTS)
        await channel.ended()
        server.headers = {}
        asked_at = time.monotonic()
        opened_at = channel.engine.client.gate.open_at
        await channel.ask("next")
        await channel.ended("next")
        assert opened_at > asked_at
        assert time.monotonic() >= opened_at
        await channel.until(lambda: channel.load.running == 0)


async def test_a_worker_is_free_again_when_its_server_may_be_asked(server: OpenAIServer) -> None:
    server.faults += [Fault("cut", after=1)] * 3
    async with running(server) as channel:
        for name in ("one", "two", "three"):
            await channel.ask(name)
            await channel.ended(name)
        await channel.until(lambda: channel.load.running == 0)


async def test_a_rate_limit_beyond_the_deadline_fails_at_once(server: OpenAIServer) -> None:
    server.faults.append(Fault("status", status=429, headers={"Retry-After": "120"}))
    async with running(server) as channel:
        await channel.ask("r", timeout_ms=20_000)
        final = await channel.ended()
        assert (final.end, final.error.reason) == (frame_pb2.TASK_END_FAILED, "OVERLOADED")
        assert 100 < final.error.retry_after_s <= 120
        await channel.until(lambda: channel.load.paused_ms > 10_000)


async def test_the_key_is_read_with_every_request(server: OpenAIServer, tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    async with running(server, api_key_file=str(file)) as channel:
        await channel.ask("r")
        await channel.ended()
        file.write_text("two")
        await channel.ask("next")
        await channel.ended("next")
        assert server.authorizations == ["Bearer one", "Bearer two"]


async def test_changes_of_health_are_told_once(server: OpenAIServer) -> None:
    one = model(server, "tokens").server
    assert one is not None
    changes = list[str]()
    async with ServerClient(
        ServerApi(one, None, 1000), server.url, lambda: changes.append(client.health.problem)
    ) as client:
        # 404: it has no such list.
        for key, status in (("secret", 200), ("secret", 200), ("", 200), ("", 500), ("", 404)):
            server.key, server.list_status = key, status
            await client.health.look()
    problems = ["401" in changes[0], changes[1], "500" in changes[2], changes[3]]
    assert problems == [True, "", True, ""]
    assert len(changes) == 4


async def test_a_worker_waits_for_its_server(server: OpenAIServer) -> None:
    async with running(server) as channel:
        health = channel.engine.client.health
        server.key = "secret"
        watching = asyncio.create_task(health.run())
        health.doubt("a test")
        await channel.until(lambda: channel.load.server_unreachable)
        await channel.ask("early")
        final = await channel.ended("early")
        assert (final.error.reason, "401" in final.error.message) == ("MODEL_UNAVAILABLE", True)
        assert not server.requests
        server.key = ""
        health.doubt("a test")
        await channel.until(lambda: not channel.load.server_unreachable)
        await channel.ask("late")
        assert (await channel.ended("late")).end == frame_pb2.TASK_END_LENGTH
        watching.cancel()


async def test_a_failed_request_asks_for_the_server(server: OpenAIServer) -> None:
    async with running(server) as channel:
        watching = asyncio.create_task(channel.engine.client.health.run())
        server.faults.extend([Fault("status")] * 3)
        server.list_status = 503
        await channel.ask("r")
        await channel.until(lambda: channel.load.server_unreachable)
        watching.cancel()


def test_proxies_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", "inside")
    assert proxy_of("https://inside/v1") is None
    assert proxy_of("https://outside/v1") == "http://proxy:3128"
