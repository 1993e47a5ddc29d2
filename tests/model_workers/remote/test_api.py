"""What is asked of a server, and what its events say."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.models.tokenizer import ChatTemplate, ModelTokenizer
from model_workers.engine.protocol import Sampling, SequenceEnd, TokenLogprobs
from model_workers.remote.api import (
    Chunk,
    ServerApi,
    ServerToken,
    ServerUsage,
)
from model_workers.remote.client import pieces_of
from model_workers.remote.faults import Retry, ServerFault, fault_of_status
from sluice.errors import EngineFailed, InvalidRequest, ModelUnavailable, Overloaded
from sluice.internal.v1.task_pb2 import ServerOptions
from sluice.settings import resolve_model_path
from sluice.settings.remote import ServerSettings
from sluice.wire.text_tokens import TEMPLATE, load_text_tokens
from tests.support.sequences import sequence_spec

TOKENS = load_text_tokens(Path(resolve_model_path("builtin:small"), "tokenizer.json"))
TEMPLATES = ChatTemplate(TEMPLATE, {}, datetime.now)
TOKENIZER = ModelTokenizer(TOKENS.tokenizer, TEMPLATES, 1000, TOKENS.conversation, frozenset())


def api(kind: str, **settings: Any) -> ServerApi:
    values = {"url": "http://h/v1", "model": "m", "api": kind, **settings}
    server = ServerSettings.model_validate(values)
    return ServerApi(server, None if kind == "tokens" else TOKENS, 1000)


CHUNKS: dict[str, tuple[str, dict[str, Any], Chunk]] = {
    "text": ("chat", {"delta": {"content": "hé"}}, Chunk(text="hé")),
    "refusal": ("chat", {"delta": {"refusal": "no"}}, Chunk(text="no")),
    "role": ("chat", {"delta": {"role": "assistant", "content": None}}, Chunk()),
    "reasoning": ("chat", {"delta": {"reasoning": "hm", "content": None}}, Chunk("hm")),
    "old reasoning": ("chat", {"delta": {"reasoning_content": "hm"}}, Chunk("hm")),
    "completion": ("completions", {"text": "x"}, Chunk(text="x")),
    "token ids": ("tokens", {"text": "x", "token_ids": [4, 5]}, Chunk(token_ids=(4, 5))),
    "stop": ("chat", {"finish_reason": "stop"}, Chunk(end=SequenceEnd.STOP)),
    "length": ("chat", {"finish_reason": "length"}, Chunk(end=SequenceEnd.LENGTH)),
    "calls": ("chat", {"finish_reason": "tool_calls"}, Chunk(end=SequenceEnd.STOP)),
    "no end": ("chat", {"finish_reason": None}, Chunk()),
    "token without bytes": (
        "chat",
        {"logprobs": {"content": [{"token": "é", "logprob": -0.5, "top_logprobs": []}]}},
        Chunk(server_tokens=(ServerToken("é".encode(), -0.5),)),
    ),
    "log-probabilities of ids": (
        "tokens",
        {"logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:4": -0.5}]}},
        Chunk(logprobs=(TokenLogprobs(-0.5, ((4, -0.5),)),)),
    ),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_what_an_event_says(name: str) -> None:
    kind, choice, expected = CHUNKS[name]
    assert api(kind).chunk(json.dumps({"choices": [choice]})) == expected


def test_an_event_may_say_what_was_counted() -> None:
    said = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}
    chunk = api("chat").chunk(json.dumps({"choices": [], "usage": said}))
    assert chunk.usage == ServerUsage(7, 2, 0)


@pytest.mark.parametrize(
    ("kind", "data", "fault", "retry"),
    [
        *(
            ("chat", data, EngineFailed, Retry.SOON)
            for data in (
                "<html>",
                "[]",
                "3",
                '{"choices": {}, "x": 1, "choices": "ab"}',
                '{"choices": [{"delta": {"content": 3}}]}',
                '{"error": {"message": "secret prompt", "code": "x"}}',
                '{"choices": [{"finish_reason": "abort"}]}',
            )
        ),
        *(
            ("chat", f'{{"error": {{"message": "secret", {code}}}}}', InvalidRequest, Retry.NEVER)
            for code in (
                '"type": "BadRequestError", "code": 400',
                '"type": "invalid_request_error", "code": null',
                '"code": "422"',
            )
        ),
        ("tokens", '{"choices": [{"text": "no ids"}]}', EngineFailed, Retry.NEVER),
    ],
)
def test_events_that_are_faults_repeat_no_text(
    kind: str, data: str, fault: Any, retry: Retry
) -> None:
    with pytest.raises(ServerFault) as caught:
        api(kind).chunk(data)
    assert (caught.value.kind, caught.value.retry) == (fault, retry)
    assert "secret" not in caught.value.message


def entry(data: bytes, logprob: float = -1.0) -> ServerToken:
    return ServerToken(data, logprob, (("x", -2.0),))


@pytest.mark.parametrize(
    ("said", "tokens", "pieces"),
    [
        ("ab", [entry(b"a"), entry(b"b")], [("a", -1.0, 1), ("b", -1.0, 1)]),
        ("é!", [entry(b"\xc3"), entry(b"\xa9"), entry(b"!")], [("é", -2.0, 0), ("!", -1.0, 1)]),
        ("\x0eab", [entry(b"ab")], [("\x0e", None, 0), ("ab", -1.0, 1)]),
        ("ab", [entry(b"ab"), entry(b"<|im_end|>", -9.0)], [("ab", -1.0, 1)]),
        ("ab", [entry(b"a"), entry(b"x")], [("ab", -2.0, 0)]),
        ("ab", [], [("ab", None, 0)]),
        ("x" * 300, [entry(b"x" * 300)], [("x" * 300, None, 0)]),
        ("\x0f", [], [("\x0f", None, 0)]),
    ],
    ids=[
        "each",
        "half characters",
        "behind a mark",
        "an end",
        "other text",
        "none",
        "too long",
        "a mark",
    ],
)
def test_pieces_by_tokens_of_the_server(said: str, tokens: Any, pieces: Any) -> None:
    found = [
        (text, one.logprob if one.text else None, len(one.top_texts))
        for text, one in pieces_of(said, tokens)
    ]
    assert found == pieces


@pytest.mark.parametrize(
    ("status", "kind", "retry"),
    [
        (400, InvalidRequest, Retry.NEVER),
        (401, ModelUnavailable, Retry.NEVER),
        (402, ModelUnavailable, Retry.NEVER),
        (404, ModelUnavailable, Retry.NEVER),
        (429, Overloaded, Retry.WHEN_ALLOWED),
        (500, ModelUnavailable, Retry.SOON),
        (503, ModelUnavailable, Retry.SOON),
        (302, ModelUnavailable, Retry.SOON),
    ],
)
def test_statuses(status: int, kind: Any, retry: Retry) -> None:
    body = json.dumps({"error": {"message": "secret", "code": "bad", "type": "t"}}).encode()
    fault = fault_of_status(status, body, None)
    assert (fault.kind, fault.retry) == (kind, retry)
    assert f"{status} (t, bad)" in fault.message
    assert "secret" not in fault.message


EXTRA = {"service_tier": "flex", "provider": {"order": ["a"]}}
SCHEMA = {"name": "answer", "schema": {"type": "array"}, "strict": True}
FUNCTION = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], set[str]]] = {
    "temperature and seed": (
        "tokens", {"temperature": 0.5, "seed": 2**40 + 3}, {},
        {"temperature": 0.5, "seed": 3}, {"top_p", "logprobs", "priority"},
    ),
    "no seed without temperature": ("tokens", {"seed": 3}, {}, {"temperature": 0.0}, {"seed"}),
    "lists": ("tokens", {"stop_token_ids": frozenset({9, 2})}, {}, {"stop_token_ids": [2, 9]}, set()),
    "log-probabilities of ids": (
        "tokens", {"logprobs": True, "top_logprobs": 2}, {},
        {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}, set(),
    ),
    "log-probabilities of a chat": (
        "chat", {"logprobs": True, "top_logprobs": 2}, {}, {"logprobs": True, "top_logprobs": 2}, set(),
    ),
    "other names": (
        "chat", {"top_k": 7, "temperature": 1.0, "seed": 1, "stop_token_ids": frozenset({9})},
        {"parameters": {"max_tokens": "max_completion_tokens", "seed": None, "top_k": "k"}},
        {"max_completion_tokens": 9, "k": 7}, {"seed", "max_tokens", "stop_token_ids"},
    ),
    "schema": (
        "chat", {"json_schema": '{"type": "array"}'}, {},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, set(),
    ),
    "grammar": (
        "tokens", {"grammar": "start: X"}, {}, {"structured_outputs": {"grammar": "start: X"}}, set(),
    ),
    "priority": ("tokens", {}, {"parameters": {"priority": "priority"}}, {"priority": 2}, set()),
    "priority of a chat": ("chat", {}, {"parameters": {"priority": "p"}}, {"p": 2}, {"cache_salt"}),
    "extra fields": ("tokens", {}, {"extra_body": EXTRA}, EXTRA, set()),
    "extra fields of a chat": ("chat", {}, {"extra_body": EXTRA}, EXTRA, set()),
    "extra fields of completions": ("completions", {}, {"extra_body": EXTRA}, EXTRA, set()),
    "required call": (
        "chat", {"server": ServerOptions(call_required=True)}, {}, {"tool_choice": "required"}, set(),
    ),
    "function": (
        "chat", {"server": ServerOptions(function="f")}, {}, {"tool_choice": FUNCTION}, set(),
    ),
    "one call": (
        "chat", {"server": ServerOptions(one_call=True)}, {}, {"parallel_tool_calls": False}, set(),
    ),
    "effort": (
        "chat", {"server": ServerOptions(reasoning_effort="low")}, {}, {"reasoning_effort": "low"}, set(),
    ),
    "template": (
        "chat", {"server": ServerOptions(chat_template_kwargs='{"a": false}')}, {},
        {"chat_template_kwargs": {"a": False}}, set(),
    ),
    "format": (
        "chat", {"server": ServerOptions(response_format='{"type": "x"}')}, {},
        {"response_format": {"type": "x"}}, set(),
    ),
    "no options": (
        "chat", {"server": ServerOptions()}, {}, {"stream": True},
        {
            "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs",
            "response_format",
        },
    ),
}  # fmt: skip
"""API, sampling, settings of the server; fields of the body, and fields that it has not."""


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_requests(name: str) -> None:
    kind, sampling, settings, fields, absent = BODIES[name]
    prompt = [TOKENS.encode("hi")[0]]
    spec = sequence_spec("r", prompt, Sampling(max_tokens=9, **sampling), rank=2)
    body = api(kind, **settings).body(spec)
    assert {field: body.get(field) for field in fields} == fields
    assert not absent & body.keys()


def test_a_row_that_was_begun_goes_on_behind_its_tokens() -> None:
    spec = sequence_spec("r", [1, 2], Sampling(max_tokens=10, min_tokens=5), produced=[3])
    body = api("tokens").body(spec)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([1, 2, 3], 9, 4)


def test_limit_at_the_context_end_is_left_to_the_server() -> None:
    spec = sequence_spec("r", [5] * 990, Sampling(max_tokens=10))
    assert "max_tokens" not in api("completions").body(spec)
    assert api("tokens").body(spec)["max_tokens"] == 10


def salts(prefix_cache: Any, **settings: Any) -> list[str | None]:
    spoken = replace(api("tokens", **settings), prefix_cache=prefix_cache)
    rows = [("r", "a"), ("s", "a"), ("t", "b")]
    specs = [replace(sequence_spec(name, [1]), tenant=tenant) for name, tenant in rows]
    return [spoken.body(spec).get("cache_salt") for spec in specs]


def test_tenants_have_salts_of_their_own() -> None:
    first, again, other = salts("tenant")
    assert first == again != other
    assert first is not None
    assert len(first) == 64
    assert salts("mesh") == [None] * 3
    assert len({*salts("off")}) == 3
    assert salts("tenant", parameters={"cache_salt": None}) == [None] * 3
    assert "cache_salt" not in api("chat").body(sequence_spec("r", [TOKENS.encode("x")[0]]))


@pytest.mark.parametrize("name", ["stream", "model", "messages", "tools", "temperature", "stop"])
def test_extra_fields_replace_none_of_ours(name: str) -> None:
    with pytest.raises(ValueError, match=rf"extra_body\.{name}: requests set it; leave it out"):
        api("chat", extra_body={name: 1, "other": 2})


@pytest.mark.parametrize("name", ["strict", "tool_choice", "chat_template_kwargs"])
def test_options_of_chats_are_refused_for_others(name: str) -> None:
    with pytest.raises(ValueError, match=rf"parameters\.{name}: only the api chat has it"):
        api("completions", parameters={name: name})
    api("completions", parameters={name: None})


@pytest.mark.parametrize(
    "content", ["hi", '"}]}', "<|sluice_conversation|><|", "naïve 😀\n\\u003c|"]
)
def test_messages_reach_the_server_as_they_were(content: str) -> None:
    messages = [{"role": "system", "content": "be nice"}, {"role": "user", "content": content}]
    prompt = TOKENIZER.encode_chat(messages)
    assert api("chat").body(sequence_spec("r", prompt))["messages"] == messages
    alone = TOKENIZER.encode_text('<|sluice_conversation|>{"messages": []}' + content)
    (message,) = api("chat").body(sequence_spec("r", alone))["messages"]
    assert message["role"] == "user"
    assert message["content"].endswith(content)


def test_tools_and_calls_reach_the_server_in_the_form_of_the_api() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = api("chat").body(sequence_spec("r", TOKENIZER.encode_chat(messages, tools=tools)))
    assert body["tools"] == tools
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": "é"}'
    assert body["messages"][2] == {"role": "tool", "content": "42", "tool_call_id": "c1"}
