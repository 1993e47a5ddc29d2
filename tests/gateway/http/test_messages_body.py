"""Bodies of Anthropic's Messages API: the chat that they become, and the names of their fields in errors."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.http.messages import MessagesBody
from sluice.openai.fields import BadField
from sluice.v1 import inference_pb2 as pb

LIMIT = 4096


LIMITS: Any = SimpleNamespace(answer_limits={}, answer_limit=LIMIT)
"""In place of a catalog."""


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    asked = messages or ({"role": "user", "content": "hello"},)
    return {"model": "small", "max_tokens": 8, "messages": list(asked), **fields}


def request_of(given: dict[str, Any]) -> pb.GenerateRequest:
    return MessagesBody(given).request(LIMITS)


def turns_of(given: dict[str, Any]) -> list[tuple[str, str]]:
    turns = request_of(given).chat.messages
    return [(pb.Role.Name(turn.role).removeprefix("ROLE_"), turn.content) for turn in turns]


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def use(call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": "Oslo"}}
    return {**call, **fields}


def result(call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
CACHED = {"type": "ephemeral", "ttl": "1h"}


def test_system_and_texts_become_turns() -> None:
    system = [text("Be brief.", cache_control=CACHED), text("Be kind.")]
    given = body(user("a"), user(text("b"), text("c")), assistant("d"), user("e"), system=system)
    assert turns_of(given) == [
        ("SYSTEM", "Be brief.\n\nBe kind."),
        ("USER", "a\n\nb\n\nc"),
        ("ASSISTANT", "d"),
        ("USER", "e"),
    ]
    assert turns_of(body(system="")) == [("USER", "hello")]


def test_texts_of_the_assistant_join_as_they_are() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    hidden = {"type": "redacted_thinking", "data": "x"}
    cited = text(" and wind", citations=None)
    given = body(user("a"), assistant(thought, hidden, text("rain"), cited), user("b"))
    assert turns_of(given)[1] == ("ASSISTANT", "rain and wind")


def test_calls_and_results_become_turns_in_order() -> None:
    calls = assistant(text("I look."), use("a", caller={"type": "direct"}), use("b", input={}))
    results = user(
        result("a", content=[text("rain"), text("wind")]),
        result("b", content="no such city", is_error=True, cache_control=CACHED),
        text("And now?"),
    )
    request = request_of(body(user("Weather?"), calls, results))
    made = request.chat.messages[1]
    assert made.content == "I look."
    assert [(call.id, call.name) for call in made.tool_calls] == [
        ("a", "weather"),
        ("b", "weather"),
    ]
    assert [json.loads(call.arguments) for call in made.tool_calls] == [{"city": "Oslo"}, {}]
    tools = [turn for turn in request.chat.messages if turn.role == pb.ROLE_TOOL]
    assert [(turn.tool_call_id, turn.content) for turn in tools] == [
        ("a", "rain\n\nwind"),
        ("b", "Error: no such city"),
    ]
    assert turns_of(body(user("Weather?"), calls, results))[-1] == ("USER", "And now?")


@pytest.mark.parametrize(
    ("content", "shown"),
    [("Error: x", "Error: x"), ("error in x", "error in x"), ("", "Error: "), (None, "Error: ")],
)
def test_result_says_once_that_it_is_an_error(content: str | None, shown: str) -> None:
    failed = result(content=content, is_error=True)
    request = request_of(body(user("a"), assistant(use()), user(failed)))
    assert request.chat.messages[-1].content == shown


def test_sampling_is_that_of_the_body() -> None:
    schema = {"type": "object", "properties": {}}
    request = request_of(
        body(
            temperature=1,
            top_p=0.5,
            top_k=4,
            stop_sequences=["END"],
            metadata={"user_id": "u-1"},
            output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
            min_p=0.25,
            chat_template_kwargs={"enable_thinking": False},
        )
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 0.5, 4)
    assert (list(sampling.stop), sampling.min_p) == (["END"], 0.25)
    assert json.loads(sampling.json_schema) == schema
    assert sampling.reasoning_effort == "low"
    assert json.loads(sampling.chat_template_kwargs) == {"enable_thinking": False}
    assert dict(request.labels) == {"user": "u-1"}


@pytest.mark.parametrize(
    ("asked", "most"), [(8, 8), (LIMIT, LIMIT), (64_000, LIMIT), (1 << 40, LIMIT)]
)
def test_max_tokens_is_cut_to_the_limit_of_the_model(asked: int, most: int) -> None:
    assert request_of(body(max_tokens=asked)).sampling.max_tokens == most


CHOICES = [
    ({"type": "auto"}, pb.TOOL_CHOICE_MODE_AUTO),
    ({"type": "any"}, pb.TOOL_CHOICE_MODE_REQUIRED),
    ({"type": "none"}, pb.TOOL_CHOICE_MODE_NONE),
]


def test_tools_and_choices() -> None:
    tool = {**TOOL, "type": "custom", "cache_control": CACHED, "strict": True}
    request = request_of(body(tools=[tool]))
    (made,) = request.tools
    assert (made.name, made.description, made.strict) == ("weather", "Tells it.", True)
    assert json.loads(made.parameters) == {"type": "object"}
    for choice, mode in CHOICES:
        single = {**choice, "disable_parallel_tool_use": True}
        request = request_of(body(tools=[TOOL], tool_choice=single))
        assert (request.tool_choice.mode, request.parallel_tool_calls) == (mode, False)
    request = request_of(body(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}))
    assert request.tool_choice.function == "weather"
    assert not request.HasField("parallel_tool_calls")


HARMLESS: list[dict[str, Any]] = [
    {"service_tier": "auto"},
    {"speed": "standard"},
    {"thinking": {"type": "disabled"}},
    {"cache_control": CACHED},
    {"container": None, "inference_geo": None, "mcp_servers": []},
    {"metadata": {"user_id": None}},
    {"output_config": {"effort": "high"}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"context_management": {"edits": [], "later": 1}},
    {"stop_sequences": []},
    {"tools": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_fields_that_change_nothing_are_taken(fields: dict[str, Any]) -> None:
    request = request_of(body(**fields))
    request.ClearField("tool_choice")
    assert request == request_of(body())


@pytest.mark.parametrize(
    ("given", "caches"),
    [
        (body(), False),
        (body(user(text("a"))), False),
        (body(cache_control=CACHED), True),
        (body(user(text("a", cache_control=CACHED))), True),
        (body(system=[text("a", cache_control=CACHED)]), True),
        (body(tools=[{**TOOL, "cache_control": CACHED}]), True),
        (body(user(text("a", cache_control=None))), False),
    ],
)
def test_cache_is_asked_for_by_any_block(given: dict[str, Any], caches: bool) -> None:
    assert MessagesBody(given).caches is caches


def test_count_has_the_prompt_of_the_message() -> None:
    given = body(user("a"), system="Be brief.", tools=[TOOL], thinking={"type": "disabled"})
    asked = request_of(given)
    count = MessagesBody({**given, "max_tokens": 1}).count_request()
    assert (count.chat, count.model, count.tools) == (asked.chat, "small", asked.tools)
    hidden = MessagesBody({**given, "tool_choice": {"type": "none"}}).count_request()
    assert not hidden.tools
    assert (
        MessagesBody(body(user("a"), assistant("b"))).count_request().chat.messages[1].content
        == "b"
    )


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "is required"),
    ({"max_tokens": -1}, "max_tokens", "out of range"),
    ({"messages": "hello"}, "messages", "list"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"system": [IMAGE]}, "system[0]", "'image'"),
    ({"system": 5}, "system", "text nor a list"),
    ({"temperature": 1.5}, "temperature", "at most 1"),
    ({"top_k": "x"}, "top_k", "whole number"),
    ({"stop_sequences": [5]}, "stop_sequences[0]", "text"),
    ({"metadata": {"team": "a"}}, "metadata.team", "not supported"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type", "disabled"),
    ({"output_config": {"effort": 5}}, "output_config.effort", "text"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "json_schema"),
    ({"service_tier": "priority"}, "service_tier", "x-sluice-priority"),
    ({"speed": "fast"}, "speed", "standard"),
    ({"thread": {"type": "create"}}, "thread", "whole conversation"),
    ({"stop": ["x"]}, "stop", "stop_sequences"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "is required"),
    ({"tools": [{**TOOL, "name": None}]}, "tools[0].name", "text"),
    ({"tools": [TOOL, {"type": "web_search_20250305", "name": "w"}]}, "tools[1].type", "'custom'"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples", "over 0 entries"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "False"),
    ({"tools": [{**TOOL, "allowed_callers": []}]}, "tools[0].allowed_callers", "at least 1"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type", "'auto', 'any'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "text"),
]
REFUSED_MESSAGES: list[tuple[list[Any], str, str]] = [
    (["hello"], "messages[0]", "object"),
    ([user("a"), assistant("b")], "messages", "end with one of the user"),
    ([{"role": "tool", "content": "x"}], "messages[0].role", "'user', 'assistant'"),
    ([{"role": "user"}], "messages[0].content", "is required"),
    ([{"role": "user", "content": 1}], "messages[0].content", "text nor a list"),
    ([{**user("a"), "name": "x"}], "messages[0].name", "leave it out"),
    ([user("a"), user(text("b"), IMAGE)], "messages[1].content[1]", "'image'"),
    ([user(use())], "messages[0].content[0]", "'tool_use'"),
    ([user({"type": ["text"]})], "messages[0].content[0]", "not supported"),
    ([user(text("a", x=1))], "messages[0].content[0].x", "leave it out"),
    ([user({"type": "text"})], "messages[0].content[0].text", "is required"),
    ([user("a"), assistant(result()), user("b")], "messages[1].content[0]", "'tool_result'"),
    (
        [user("a"), assistant(use()), user(result(content=[text("b"), IMAGE]))],
        "messages[2].content[0].content[1]",
        "'image'",
    ),
    ([user(*[text("a")] * 2049)], "messages[0].content", "2048"),
    ([assistant(IMAGE), user("a")], "messages[0].content[0]", "text and tool_use"),
]


@pytest.mark.parametrize(("messages", "named", "says"), REFUSED_MESSAGES, ids=str)
def test_wrong_messages_are_named(messages: list[Any], named: str, says: str) -> None:
    test_unsupported_fields_are_named({"messages": messages}, named, says)


@pytest.mark.parametrize(("fields", "named", "says"), REFUSED, ids=str)
def test_unsupported_fields_are_named(fields: dict[str, Any], named: str, says: str) -> None:
    with pytest.raises(BadField) as refused:
        request_of({**body(), **fields})
    field, _, description = str(refused.value).partition(": ")
    assert field == named
    assert says in description


def test_fields_of_the_proto_have_the_names_of_the_body() -> None:
    calls = assistant(text("I look."), use("a"), use("b"))
    given = body(user("a"), calls, user(result("a"), text("now?"), result("b")), system="Be brief.")
    named = MessagesBody({**given, "tools": [TOOL], "metadata": {"user_id": "u"}})
    named.request(LIMITS)
    assert {path: named.named(path) for path in NAMES} == NAMES


NAMES = {
    "chat.messages": "messages",
    "chat.messages[0].content": "system",
    "chat.messages[1].content": "messages[0].content",
    "chat.messages[2].tool_calls[1].arguments": "messages[1].content[2].input",
    "chat.messages[2].tool_calls[0].id": "messages[1].content[1].id",
    "chat.messages[2].tool_calls[0].name": "messages[1].content[1].name",
    "chat.messages[3].tool_call_id": "messages[2].content[0].tool_use_id",
    "chat.messages[4].content": "messages[2].content",
    "chat.messages[5].tool_call_id": "messages[2].content[2].tool_use_id",
    "chat.messages[6].content": "messages[6].content",
    "chat.messages[2].tool_calls": "messages[1].tool_calls",
    "sampling.max_tokens": "max_tokens",
    "sampling.stop[0]": "stop_sequences[0]",
    "sampling.stop": "stop_sequences",
    "sampling.stop_token_ids": "stop_token_ids",
    "sampling.json_schema": "output_config.format",
    "tools[0].parameters": "tools[0].input_schema",
    "tools[0].name": "tools[0].name",
    "tool_choice.function": "tool_choice.name",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "sampling.reasoning_effort": "output_config.effort",
    "labels": "metadata",
    "labels.user": "metadata.user_id",
    "labels.team": "x-sluice-label-team",
    "model": "model",
    "x-sluice-priority": "x-sluice-priority",
}
