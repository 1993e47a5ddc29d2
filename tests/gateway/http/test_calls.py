"""What the HTTP API refuses, and how; models, health, the end of a gateway."""

import asyncio
import re
import socket
import threading
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from gateway.admission.arrivals import LOOP_BYTES
from gateway.http import call as call_module
from gateway.http.requests import parse_json
from sluice.errors import SetupError
from tests.gateway.kit.batcher import last
from tests.gateway.kit.http import CHAT, Connection, ask, chat, health_of
from tests.gateway.kit.wire import Wire, open_wire

AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
WRONG_BODIES: list[tuple[Any, str | None, str]] = [
    (b"{", None, "is not JSON"),
    (b"[1]", None, "not a JSON object"),
    (b'{"model": "\xff"}', None, "UTF-8"),
    (b'{"a":' * 100_000, None, "values"),
    (b'{"a":[' + b"[]," * 70_000 + b"1]}", None, "values"),
    (b'{"a":' * 30_000, None, "is nested too deeply"),
    (b'{"a":' + b"9" * 5000 + b"}", None, "a number of over 4300 digits"),
    (chat(temperature=float("nan")), None, "NaN"),
    ({"model": "small"}, "messages", "is required"),
    (chat(prompt="x"), "prompt", "not a field"),
    (chat(colour=1), "colour", "not supported"),
    (chat(temperature=3), "temperature", "[0, 2]"),
    (chat(max_tokens=0), "max_tokens", "must be in [1"),
    (chat(n=17), "n", "must be in [1"),
    (chat(top_logprobs=1), "top_logprobs", "needs logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "must be in [0, 20]"),
    (chat(seed=1 << 64), "seed", "out of range"),
    (chat(verbosity="low"), "verbosity", "prompt"),
    (chat(reasoning_effort="high"), "reasoning_effort", "leave it out"),
    (chat(chat_template_kwargs={"messages": 1}), "chat_template_kwargs", "reserved"),
    (chat(functions=[{"name": "f"}]), "functions", "tools"),
    (chat(service_tier="flex"), "service_tier", "x-sluice-priority"),
    (chat(min_tokens=1, regex="a"), "min_tokens", "a regular expression"),
    (chat(stream="yes"), "stream", "true or false"),
    (chat(stream=True, stream_options={"a": 1}), "stream_options.a", "supported"),
    (chat(ignore_eos=True), "ignore_eos", "needs max_tokens"),
    (chat(response_format={"type": "xml"}), "response_format", "json_schema"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": 5}}}),
        "response_format",
        "type must be",
    ),
    (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role", "not one of"),
    (chat(messages=[{"role": "user", "content": ""}]), "messages", "no text"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "text"),
    (chat(messages=[{"role": ["user"], "content": "x"}]), "messages[0].role", "not one of"),
    (chat("\ud800"), None, "surrogate"),
    ({**chat(), "\ud800": 1}, None, "surrogate"),
    (chat([{"type": "text", "text": "x"}, AUDIO]), "messages[0].content", "of type text"),
]
PROTO = re.compile("ROLE_|sampling\\.|chat\\.|raw_prompt|json_schema:")
"""Words that this API has not."""
WRONG_HEADERS = [
    ({"x_sluice_priority": "high"}, "x-sluice-priority"),
    ({"x_sluice_timeout": "soon"}, "x-sluice-timeout"),
    ({"x_sluice_prority": "bulk"}, "x-sluice-prority"),
    ({"sluice_tenant": "a b"}, "sluice-tenant"),
    ({"content_type": "text/plain"}, "content-type"),
    ({"idempotency_key": "k" * 129}, "idempotency-key"),
]


async def test_what_is_wrong_is_refused_by_its_name(http: Wire) -> None:
    for body, param, says in WRONG_BODIES:
        reply = await ask(http.http, body=body)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), body
        assert reply.error["param"] == param, body
        assert says in reply.error["message"], body
        assert reply.headers["x-request-id"].startswith("req-")
        assert not PROTO.search(reply.error["message"]), body
    for headers, named in WRONG_HEADERS:
        reply = await ask(http.http, body=chat(), **headers)
        assert (reply.status, reply.error["param"]) == (400, named)
    assert http.gateway.active == 0


SITES = [
    ({"sec_fetch_site": "cross-site"}, 403),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "https://evil.example", "sec_fetch_site": "same-site"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://[::1"}, 403),
    ({"origin": "http://localhost:3000", "sec_fetch_site": "same-site"}, 200),
    ({"sec_fetch_site": "same-origin"}, 200),
    ({"sec_fetch_site": "none"}, 200),
]


async def test_a_page_of_another_site_sends_nothing(http: Wire) -> None:
    for headers, status in SITES:
        reply = await ask(http.http, "/v1/models", method="GET", **headers)
        assert reply.status == status, headers
        # Browsers send a form unasked; one that comes through has no file.
        form = {"content_type": "multipart/form-data; boundary=x", **headers}
        reply = await ask(http.http, "/v1/files", b"--x--\r\n", **form)
        assert (reply.status == 403) == (status == 403), headers


HOSTS = [
    "localhost/evil.example",
    "127.0.0.1@evil.example",
    "localhost%00",
    "a b",
    "localhost?x",
    "[::1]#",
]


async def test_host_that_is_no_name_is_refused(http: Wire) -> None:
    for host in HOSTS:
        reply = await ask(http.http, "/v1/models", method="GET", host=host)
        assert (reply.status, reply.error["code"]) == (403, "permission_denied"), host


async def test_host_that_is_no_name_is_refused_behind_a_proxy(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", http_hosts=["*"]) as wire:
        for host, status in (("evil/x", 400), ("llm_1.example:8000", 200), ("[::1]:80", 200)):
            reply = await ask(wire.http, "/v1/models", method="GET", host=host)
            assert reply.status == status, host
        assert reply.json["object"] == "list"


async def test_long_content_type_is_refused(http: Wire) -> None:
    kind = "multipart/form-data; boundary=x" + "; a=b" * 300
    reply = await ask(http.http, "/v1/files", b"--x--\r\n", content_type=kind)
    assert (reply.status, reply.error["param"]) == (400, "content-type")
    assert "1024 characters" in reply.error["message"]


async def test_an_unknown_model_is_not_found(openai: AsyncOpenAI) -> None:
    with pytest.raises(sdk.NotFoundError) as caught:
        await openai.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_prompt_that_is_too_long_has_openais_code(http: Wire) -> None:
    reply = await ask(http.http, body=chat("hello " * 500))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    # LiteLLM and others look for these words.
    assert "this model's maximum context length is 256 tokens" in reply.error["message"]
    assert reply.headers["x-request-id"].startswith("req-")


async def test_paths_and_methods_that_are_not_there(http: Wire) -> None:
    for path in ("/v1/nope", f"{CHAT}/", "/v1/files/", "/health/", "//evil.example/"):
        missing = await ask(http.http, path, {}, host="evil.example")
        assert (missing.status, missing.error["code"]) == (404, "unknown_url"), path
        assert "location" not in missing.headers
        assert missing.headers["x-request-id"].startswith("req-")
    reply = await ask(http.http, CHAT, method="GET")
    assert (reply.status, reply.error["code"]) == (405, "unknown_url")
    assert reply.headers["x-request-id"].startswith("req-")


async def test_models_and_health(http: Wire, openai: AsyncOpenAI) -> None:
    listed = [model async for model in openai.models.list()]
    assert [model.id for model in listed] == ["auto", "small", "large"]
    assert (await openai.models.retrieve("small")).owned_by == "sluice"
    with pytest.raises(sdk.NotFoundError):
        await openai.models.retrieve("nope")
    assert (await health_of(http.http)).json == {"status": "ok"}
    http.gateway.streams.problem = "JetStream is away"
    reply = await ask(http.http, "/health", method="GET")
    assert (reply.status, reply.json["status"]) == (200, "degraded")
    assert reply.json["problem"] == "JetStream is away"


async def test_a_body_that_is_too_large_is_not_read(http: Wire) -> None:
    """What the head says is refused at once; what comes unannounced when the limit is reached."""
    connection = await Connection.to(http.http)
    await connection.send(CHAT, b"", content_length="100000000")
    assert (await connection.reply()).status == 413
    connection.close()
    connection = await Connection.to(http.http)
    await connection.send(CHAT, b"", content_length="", transfer_encoding="chunked")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    for _ in range(20):
        connection.writer.write(chunk)
    reply = await connection.reply()
    assert (reply.status, reply.error["code"]) == (413, "message_too_large")
    connection.close()


async def test_a_body_that_does_not_come_is_given_up(http: Wire) -> None:
    http.gateway.arrivals.receive_s = 0.05
    reply = await ask(http.http, body=b"{", content_length="2")
    assert (reply.status, reply.error["code"]) == (408, "body_too_slow")


async def test_a_gateway_that_drains_refuses_and_lets_calls_end(http: Wire) -> None:
    asking = asyncio.ensure_future(ask(http.http, body=chat()))
    task = await http.batcher.task()
    draining = asyncio.ensure_future(http.gateway.drain())
    await http.until(lambda: http.gateway.limiter.is_draining)
    reply = await ask(http.http, body=chat())
    assert (reply.status, reply.error["code"]) == (503, "shutting_down")
    assert "retry-after" in reply.headers
    assert (await ask(http.http, "/health", method="GET")).status == 503
    await http.batcher.send(task, last(0, http.tokens("hello")))
    assert (await asking).status == 200
    await draining


async def test_a_port_in_use_is_a_setup_error(nats_url: str, model_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SetupError, match=f"http.address: {address} is in use"):
            async with open_wire(nats_url, model_folder, http=address):
                pass


@pytest.mark.parametrize(("size", "in_loop"), [(1, True), (LOOP_BYTES, False)])
async def test_long_bodies_are_parsed_in_threads(
    http: Wire, size: int, in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_in = list[threading.Thread]()

    def parse(body: bytes) -> dict[str, Any]:
        parsed_in.append(threading.current_thread())
        return parse_json(body)

    monkeypatch.setattr(call_module, "parse_json", parse)
    reply = await ask(http.http, body=chat("x", wrong="x" * size))
    assert (reply.status, reply.error["param"]) == (400, "wrong")
    assert [one is threading.current_thread() for one in parsed_in] == [in_loop]
