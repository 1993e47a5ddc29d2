"""Log-probabilities over HTTP: of the text that is returned, in every shape, whole and streamed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.http.logprobs import TextLogprobs
from sluice.internal.v1.frame_pb2 import TASK_END_STOP, Logprobs
from sluice.v1.inference_pb2 import TokenLogprobs
from tests.gateway.http.test_tools import ASKED, CALL, WEATHER
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.http import CHAT, ask, chat, events_in
from tests.gateway.kit.tokenizer import END, TOOLS_TEMPLATE, write_model
from tests.gateway.kit.wire import Wire

COMPLETIONS = "/v1/completions"
TEXT = "a\U0001f600b\u00e9 one two three four"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tools"), template=TOOLS_TEMPLATE, context=2048)


async def answered(wire: Wire, path: str, body: dict[str, Any], text: str = TEXT) -> Any:
    """Return the choice of a whole answer, or the events of a stream."""
    asking = asyncio.ensure_future(ask(wire.http, path, body))
    task = await wire.batcher.task()
    token_ids = [*wire.tokens(text), *wire.tokens(END)]
    for at, one in enumerate(token_ids):
        tops = {"top_token_ids": [one, one + 1], "top_logprobs": [-0.5, -2.0]}
        scored = [Logprobs(logprob=-0.5, **tops)]
        end = {"end": TASK_END_STOP} if at + 1 == len(token_ids) else {}
        await wire.batcher.send(task, frame(at, [one], logprobs=scored, **end))
    reply = await asking
    assert reply.status == 200, reply.body
    return events_in(reply.body)[:-1] if body.get("stream") else reply.json["choices"][0]


def streamed(events: list[Any], part: str) -> tuple[str, list[Any]]:
    """Return the text of a chat, and what ``part`` of its log-probabilities has."""
    choices = [event["choices"][0] for event in events]
    text = "".join(one["delta"].get("content") or "" for one in choices)
    return text, [entry for one in choices if one["logprobs"] for entry in one["logprobs"][part]]


@pytest.mark.parametrize("stop", [[], ["three"], ["\u00e9 one"]])
async def test_chat_tokens_join_to_the_text(http: Wire, stop: list[str]) -> None:
    body = chat(logprobs=True, top_logprobs=2, stop=stop)
    whole = await answered(http, CHAT, body)
    entries = whole["logprobs"]["content"]
    text = whole["message"]["content"]
    assert text == TEXT[: TEXT.find(stop[0])] if stop else TEXT
    assert "".join(entry["token"] for entry in entries) == text
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert all(one["bytes"] for entry in entries for one in entry["top_logprobs"])
    events = await answered(http, CHAT, {**body, "stream": True})
    assert streamed(events, "content") == (text, entries)


async def test_text_offset_counts_characters(http: Wire) -> None:
    body = {"model": "small", "prompt": "x", "max_tokens": 64, "logprobs": 2}
    whole = await answered(http, COMPLETIONS, body)
    logprobs, text = whole["logprobs"], whole["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    assert logprobs["text_offset"][-1] == len(text) - len(logprobs["tokens"][-1])
    # Alternatives that are no whole characters are known by their bytes.
    assert {len(top) for top in logprobs["top_logprobs"]} == {2}
    assert any(name.startswith("bytes:\\x") for top in logprobs["top_logprobs"] for name in top)
    events = await answered(http, COMPLETIONS, {**body, "stream": True})
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [value for part in parts if part for value in part[name]] == logprobs[name]


@pytest.mark.parametrize("text", [f"I look.\n{CALL}", "I look. <tool", f"{CALL} done"])
async def test_calls_have_no_logprobs(http: Wire, text: str) -> None:
    body = {"model": "small", "messages": ASKED, "tools": [WEATHER], "logprobs": True}
    whole = await answered(http, CHAT, body, text)
    entries, content = whole["logprobs"]["content"], whole["message"]["content"] or ""
    assert "".join(entry["token"] for entry in entries) == content
    events = await answered(http, CHAT, {**body, "stream": True}, text)
    assert streamed(events, "content") == (content, entries)


async def test_responses_have_those_of_their_text(http: Wire) -> None:
    body = {"model": "small", "input": "x", "include": ["message.output_text.logprobs"]}
    body |= {"top_logprobs": 2, "stream": True}
    asking = asyncio.ensure_future(ask(http.http, "/v1/responses", body))
    task = await http.batcher.task()
    assert (task.sampling.logprobs, task.sampling.top_logprobs) == (True, 2)
    for at, one in enumerate(token_ids := http.tokens(TEXT)):
        scored = [Logprobs(logprob=-0.5, top_token_ids=[one], top_logprobs=[-0.5])]
        end = {"end": TASK_END_STOP} if at + 1 == len(token_ids) else {}
        await http.batcher.send(task, frame(at, [one], logprobs=scored, **end))
    lines = (await asking).body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert part["text"] == TEXT == "".join(one["token"] for one in part["logprobs"])
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
    assert all(one["top_logprobs"] and "bytes" in one for one in part["logprobs"])


def entry(text: str, data: bytes = b"") -> TokenLogprobs:
    return TokenLogprobs(text=text, logprob=-1, token_bytes=data or text.encode())


def test_logprobs_wait_for_their_text() -> None:
    known = TextLogprobs()
    smile = [entry("", b"\xf0\x9f"), entry("\U0001f600", b"\x98\x80")]
    assert known.push([entry("a"), entry(".\n"), *smile], "a.") == [entry("a")]
    assert known.push([], "\n") == [entry(".\n")]
    assert known.push([entry("{"), entry("x")], "\U0001f600") == smile
    assert known.push([entry("b")], "b") == [entry("b")]
    assert known.push([entry(" c \n")], " c") == []
    (last,) = known.flush()
    assert (last.text, last.token_bytes, last.logprob) == (" c", b" c", -1)
