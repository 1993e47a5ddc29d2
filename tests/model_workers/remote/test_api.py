"""What is asked of a server, and what its events say."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.models.tokenizer import ChatTemplate, ModelTokenizer
from model_workers.engine.protocol import Sampling, SequenceEnd
from model_workers.remote.api import EVENT_BYTES_MAX, EventReader, ServerApi, ServerToken
from model_workers.remote.client import pieces_of
from model_workers.remote.faults import Retry, ServerFault, fault_of_status
from sluice.errors import InvalidRequest, ModelUnavailable, Overloaded
from sluice.internal.v1.task_pb2 import ServerOptions
from sluice.settings import resolve_model_path
from sluice.settings.remote import ServerSettings
from sluice.wire.text_tokens import TEMPLATE, load_text_tokens
from tests.support.sequences import sequence_spec

TOKENS = load_text_tokens(Path(resolve_model_path("builtin:small"), "tokenizer.json"))


def api(kind: str, **settings: Any) -> ServerApi:
    values = {"url": "http://h/v1", "model": "m", "api": kind, **settings}
    server = ServerSettings.model_validate(values)
    return ServerApi(server, None if kind == "tokens" else TOKENS, 1000)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    sent = 'event: x\r\ndata: {"é"\ndata: :1}\n\n: ping\n\ndata:[DONE]\n\nid: 3\n'.encode()
    reader, found = EventReader(), []
    for start in range(0, len(sent), size):
        found += reader.feed(sent[start : start + size])
    assert found == ['{"é"\n:1}', "[DONE]"]


def test_an_event_without_an_end_is_a_fault() -> None:
    reader = EventReader()
    with pytest.raises(ServerFault, match="without an end"):
        list(reader.feed(b"data: " + b"x" * EVENT_BYTES_MAX))


@pytest.mark.parametrize(
    ("kind", "choice", "said"),
    [
        ("chat", {"delta": {"content": "hé"}}, ("hé", ())),
        ("chat", {"delta": {"refusal": "no"}}, ("no", ())),
        ("chat", {"delta": {"role": "assistant", "content": None}}, ("", ())),
        ("completions", {"text": "x"}, ("x", ())),
        ("tokens", {"text": "x", "token_ids": [4, 5]}, ("", (4, 5))),
    ],
)
def test_what_an_event_says(kind: str, choice: Any, said: Any) -> None:
    chunk = api(kind).chunk(json.dumps({"choices": [choice]}))
    assert (chunk.text, chunk.token_ids) == said
    assert chunk.end is None


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


def test_tokens_without_bytes() -> None:
    said = {"content": [{"token": "é", "logprob": -0.5, "top_logprobs": []}]}
    choice = {"delta": {"content": "é"}, "logprobs": said}
    chunk = api("chat").chunk(json.dumps({"choices": [choice]}))
    assert chunk.server_tokens == (ServerToken("é".encode(), -0.5),)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_has_two_names(field: str) -> None:
    chunk = api("chat").chunk(json.dumps({"choices": [{"delta": {field: "hm", "content": None}}]}))
    assert (chunk.reasoning, chunk.text) == ("hm", "")


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("stop", SequenceEnd.STOP),
        ("length", SequenceEnd.LENGTH),
        ("tool_calls", SequenceEnd.STOP),
        (None, None),
    ],
)
def test_ends(reason: str | None, end: SequenceEnd | None) -> None:
    chunk = api("chat").chunk(json.dumps({"choices": [{"finish_reason": reason}]}))
    assert chunk.end == end


def test_usage_and_logprobs() -> None:
    said = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}
    usage = api("chat").chunk(json.dumps({"choices": [], "usage": said})).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.answer_tokens, usage.cached_tokens) == (7, 2, 0)
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:4": -0.5, "token_id:9": -1}]}
    choice = {"token_ids": [4], "logprobs": logprobs}
    (found,) = api("tokens").chunk(json.dumps({"choices": [choice]})).logprobs
    assert found.logprob == -0.5
    assert found.top == ((4, -0.5), (9, -1))


@pytest.mark.parametrize(
    "data",
    [
        "<html>",
        "[]",
        "3",
        '{"choices": {}, "x": 1, "choices": "ab"}',
        '{"choices": [{"delta": {"content": 3}}]}',
        '{"error": {"message": "secret prompt", "code": "x"}}',
        '{"choices": [{"finish_reason": "abort"}]}',
    ],
)
def test_rubbish_is_a_fault_that_repeats_no_text(data: str) -> None:
    with pytest.raises(ServerFault) as caught:
        api("chat").chunk(data)
    assert caught.value.retry is Retry.SOON
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "error",
    [
        {"message": "secret", "type": "BadRequestError", "code": 400},
        {"message": "secret", "type": "invalid_request_error", "code": None},
        {"message": "secret", "code": "422"},
    ],
)
def test_a_stream_may_say_that_the_request_is_wrong(error: dict[str, Any]) -> None:
    with pytest.raises(ServerFault) as caught:
        api("chat").chunk(json.dumps({"error": error}))
    assert (caught.value.kind, caught.value.retry) == (InvalidRequest, Retry.NEVER)
    assert "secret" not in caught.value.message


def test_a_server_without_token_ids_is_told_apart() -> None:
    with pytest.raises(ServerFault, match="set api of the model") as caught:
        api("tokens").chunk('{"choices": [{"text": "x"}]}')
    assert caught.value.retry is Retry.NEVER


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


def test_a_row_that_was_begun_goes_on_behind_its_tokens() -> None:
    spec = sequence_spec("r", [1, 2], Sampling(max_tokens=10, min_tokens=5), produced=[3])
    body = api("tokens").body(spec)
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["min_tokens"]) == (9, 4)
    assert body["return_token_ids"]


def test_sampling_parameters_have_the_names_of_the_server() -> None:
    sampling = Sampling(
        max_tokens=10,
        temperature=0.5,
        seed=2**40 + 3,
        top_k=7,
        presence_penalty=0.25,
        stop_token_ids=frozenset({9, 2}),
        logprobs=True,
        top_logprobs=2,
        json_schema='{"type": "object"}',
    )
    body = api("tokens").body(sequence_spec("r", [1], sampling))
    assert {key: body[key] for key in ("temperature", "seed", "top_k", "stop_token_ids")} == {
        "temperature": 0.5,
        "seed": 3,
        "top_k": 7,
        "stop_token_ids": [2, 9],
    }
    assert body["logprobs"] == 2
    assert body["return_tokens_as_token_ids"]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "top_p" not in body
    named = {"max_tokens": "max_completion_tokens", "seed": None, "top_k": "k"}
    renamed = api("chat", parameters=named).body(
        sequence_spec("r", [TOKENS.encode("hi")[0]], sampling)
    )
    assert (renamed["max_completion_tokens"], renamed["k"]) == (10, 7)
    assert (renamed["logprobs"], renamed["top_logprobs"]) == (True, 2)
    assert not {"seed", "max_tokens", "stop_token_ids"} & renamed.keys()


def options(**given: Any) -> Sampling:
    return Sampling(max_tokens=9, server=ServerOptions(**given), json_schema=given.get("schema"))


@pytest.mark.parametrize(
    ("given", "field", "sent"),
    [
        ({"call_required": True}, "tool_choice", "required"),
        (
            {"function": "f", "call_required": False},
            "tool_choice",
            {"type": "function", "function": {"name": "f"}},
        ),
        ({"one_call": True}, "parallel_tool_calls", False),
        ({"reasoning_effort": "low"}, "reasoning_effort", "low"),
        ({"chat_template_kwargs": '{"a": false}'}, "chat_template_kwargs", {"a": False}),
        ({"response_format": '{"type": "x"}'}, "response_format", {"type": "x"}),
    ],
)
def test_options_of_a_request_reach_its_server(given: Any, field: str, sent: Any) -> None:
    prompt = [TOKENS.encode("hi")[0]]
    assert api("chat").body(sequence_spec("r", prompt, options(**given)))[field] == sent
    plain = api("chat").body(sequence_spec("r", prompt, Sampling(max_tokens=9)))
    assert field not in plain
    assert field not in api("chat").body(sequence_spec("r", prompt, options()))


def test_a_schema_alone_is_asked_for_strictly() -> None:
    sampling = Sampling(max_tokens=9, json_schema='{"type": "array"}', server=ServerOptions())
    (token,) = TOKENS.encode("x")
    asked = api("chat").body(sequence_spec("r", [token], sampling))["response_format"][
        "json_schema"
    ]
    assert (asked["schema"], asked["strict"]) == ({"type": "array"}, True)


def test_a_grammar_of_calls_is_a_structured_output() -> None:
    sampling = Sampling(max_tokens=9, grammar="start: X")
    assert api("tokens").body(sequence_spec("r", [1], sampling))["structured_outputs"] == {
        "grammar": "start: X"
    }


def test_priority_is_sent_where_settings_name_it() -> None:
    spec = sequence_spec("r", [1], rank=2)
    assert "priority" not in api("tokens").body(spec)
    for kind in ("tokens", "chat"):
        named = {"priority": "priority"}
        one = sequence_spec("r", [TOKENS.encode("x")[0]], rank=2)
        assert api(kind, parameters=named).body(one)["priority"] == 2


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


def test_extra_fields_are_in_every_request() -> None:
    extra = {"service_tier": "flex", "provider": {"order": ["a"]}}
    for kind in ("tokens", "chat", "completions"):
        body = api(kind, extra_body=extra).body(sequence_spec("r", [TOKENS.encode("x")[0]]))
        assert {name: body[name] for name in extra} == extra


@pytest.mark.parametrize("name", ["stream", "model", "messages", "tools", "temperature", "stop"])
def test_extra_fields_replace_none_of_ours(name: str) -> None:
    with pytest.raises(ValueError, match=rf"extra_body\.{name}: requests set it; leave it out"):
        api("chat", extra_body={name: 1, "other": 2})


@pytest.mark.parametrize("name", ["strict", "tool_choice", "chat_template_kwargs"])
def test_options_of_chats_are_refused_for_others(name: str) -> None:
    with pytest.raises(ValueError, match=rf"parameters\.{name}: only the api chat has it"):
        api("completions", parameters={name: name})
    api("completions", parameters={name: None})


def test_limit_at_the_context_end_is_left_to_the_server() -> None:
    spec = sequence_spec("r", [5] * 990, Sampling(max_tokens=10))
    assert "max_tokens" not in api("completions").body(spec)
    assert api("tokens").body(spec)["max_tokens"] == 10


@pytest.mark.parametrize(
    "content", ["hi", '"}]}', "<|sluice_conversation|><|", "naïve 😀\n\\u003c|"]
)
def test_messages_reach_the_server_as_they_were(content: str) -> None:
    tokenizer = ModelTokenizer(
        TOKENS.tokenizer,
        ChatTemplate(TEMPLATE, {}, datetime.now),
        1000,
        TOKENS.conversation,
        frozenset(),
    )
    messages = [{"role": "system", "content": "be nice"}, {"role": "user", "content": content}]
    prompt = tokenizer.encode_chat(messages)
    assert api("chat").body(sequence_spec("r", prompt))["messages"] == messages
    alone = tokenizer.encode_text('<|sluice_conversation|>{"messages": []}' + content)
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
    tokenizer = ModelTokenizer(
        TOKENS.tokenizer,
        ChatTemplate(TEMPLATE, {}, datetime.now),
        1000,
        TOKENS.conversation,
        frozenset(),
    )
    body = api("chat").body(sequence_spec("r", tokenizer.encode_chat(messages, tools=tools)))
    assert body["tools"] == tools
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": "é"}'
    assert body["messages"][2] == {"role": "tool", "content": "42", "tool_call_id": "c1"}
