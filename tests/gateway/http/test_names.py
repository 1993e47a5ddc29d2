"""An error names the field that the client sent, in the words of its API."""

from typing import Any

import pytest

from gateway.http.names import BodyKind, FieldNames
from gateway.http.responses import chat_of
from tests.gateway.kit.http import CHAT, ask, chat
from tests.gateway.kit.wire import Wire

RESPONSES = "/v1/responses"
PATHS = [
    (BodyKind.CHAT, "input", "messages"),
    (BodyKind.CHAT, "chat.messages[3].tool_calls[0].arguments", "messages[3].tool_calls[0].function.arguments"),
    (BodyKind.CHAT, "chat.messages[3].tool_call_id", "messages[3].tool_call_id"),
    (BodyKind.CHAT, "sampling.logprobs", "top_logprobs"),
    (BodyKind.CHAT, "tools[1].parameters", "tools[1].function.parameters"),
    (BodyKind.CHAT, "tool_choice.function", "tool_choice.function.name"),
    (BodyKind.CHAT, "idempotency_key", "idempotency-key"),
    (BodyKind.CHAT, "metadata.sluice-tenant", "sluice-tenant"),
    (BodyKind.COMPLETION, "input", "prompt"),
    (BodyKind.COMPLETION, "sampling.logprobs", "logprobs"),
    (BodyKind.TEXTS, "texts[1]", "input[1]"),
    (BodyKind.RESPONSE, "input", "input"),
    (BodyKind.RESPONSE, "sampling.logprobs", "top_logprobs"),
    (BodyKind.RESPONSE, "sampling.max_tokens", "max_output_tokens"),
    (BodyKind.RESPONSE, "sampling.json_schema", "text.format"),
    (BodyKind.RESPONSE, "tools[1].parameters", "tools[1].parameters"),
    (BodyKind.RESPONSE, "tool_choice.function", "tool_choice.name"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "name"), PATHS)
def test_paths_become_names(kind: BodyKind, path: str, name: str) -> None:
    assert FieldNames(kind)(path) == name


SENT = [
    ({"metadata": {"a": "x"}}, "labels.a", "metadata.a"),
    ({"metadata": {"a": "x"}}, "labels", "metadata"),
    ({"metadata": {"a": "x"}}, "labels.b", "x-sluice-label-b"),
    ({"user": "u", "metadata": {}}, "labels.user", "user"),
    ({"max_completion_tokens": 0}, "sampling.max_tokens", "max_completion_tokens"),
    (
        {"max_completion_tokens": 0, "max_tokens": None},
        "sampling.max_tokens",
        "max_completion_tokens",
    ),
    ({"max_tokens": 0}, "sampling.max_tokens", "max_tokens"),
    ({"stop": "x"}, "sampling.stop[0]", "stop"),
    ({"stop": ["x"]}, "sampling.stop[0]", "stop[0]"),
]


@pytest.mark.parametrize(("body", "path", "name"), SENT)
def test_names_depend_on_what_was_sent(body: dict[str, Any], path: str, name: str) -> None:
    assert FieldNames(BodyKind.CHAT, body)(path) == name


def test_labels_of_a_batch_are_its_metadata() -> None:
    names = FieldNames(BodyKind.BATCH, {"metadata": {"a": "x"}})
    assert (names("spec.labels.a"), names("spec.labels")) == ("metadata.a", "metadata")


def test_a_text_that_is_alone_is_the_input() -> None:
    assert FieldNames(BodyKind.TEXTS, {"input": "w"})("texts[0]") == "input"


def test_items_of_responses_have_their_own_places() -> None:
    items = [
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "x"},
    ]
    places = dict[str, str]()
    chat_of({"instructions": "i", "input": items}, places)
    names = FieldNames(BodyKind.RESPONSE, {}, places)
    expected = {
        "messages[0].content": "instructions",
        "messages[1].content": "input[0].content",
        "messages[2].tool_calls[0].arguments": "input[2].arguments",
        "messages[2].tool_calls[1].id": "input[3].call_id",
        "messages[3].content": "input[4].output",
        "messages[3].tool_call_id": "input[4].call_id",
        "messages": "input",
    }
    assert {path: names(f"chat.{path}") for path in expected} == expected


def turned(role: str, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "u"}, {"role": role, **fields}])


CALLED: Any = {"id": "c", "type": "function", "function": {"name": "f" * 257, "arguments": "{}"}}
WRONG: list[tuple[str, Any, str]] = [
    (CHAT, turned("tool", content="x", tool_call_id="c"), "messages[1].tool_call_id"),
    (CHAT, turned("assistant", tool_calls=[CALLED]), "messages[1].tool_calls[0].function.name"),
    (CHAT, chat(metadata={"trace": "v" * 513}), "metadata.trace"),
    (CHAT, chat(metadata={"k" * 65: "v"}), "metadata." + "k" * 65),
    (CHAT, chat(metadata={str(n): "v" for n in range(33)}), "metadata"),
    (CHAT, chat(user="v" * 513), "user"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat("hello " * 500), "messages"),
    ("/v1/completions", {"model": "small", "prompt": "hello " * 500}, "prompt"),
    (RESPONSES, {"model": "small", "input": "hello " * 500}, "input"),
    (RESPONSES, {"model": "small", "input": [{"role": "user", "content": 5}]}, "input[0].content"),
    (
        RESPONSES,
        {
            "model": "small",
            "input": [
                {"role": "user", "content": "u"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
        },
        "input[1].call_id",
    ),
]


async def test_errors_name_the_field_of_the_client(http: Wire) -> None:
    for path, body, param in WRONG:
        reply = await ask(http.http, path, body)
        assert (reply.status, reply.error["param"]) == (400, param), reply.error
        assert param in reply.error["message"]
    headers = {f"x_sluice_label_{n}": "v" for n in range(33)}
    reply = await ask(http.http, body=chat(), **headers)
    assert (reply.status, reply.error["param"]) == (400, "x-sluice-label-NAME")
