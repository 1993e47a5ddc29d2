"""What other servers, SDKs and agents produce and send back becomes a request, or an error with the client's name."""

from typing import Any

import pytest

from sluice.openai.fields import BadField
from sluice.openai.requests import CHAT, COMPLETIONS, request_of_body
from sluice.v1 import inference_pb2 as pb

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "u"}


def read(*messages: Json, **fields: Any) -> pb.GenerateRequest:
    return request_of_body(CHAT, {"messages": [USER, *messages], **fields}, pb.GenerateRequest())


def refused(*messages: Json, **fields: Any) -> str:
    with pytest.raises(BadField) as raised:
        read(*messages, **fields)
    return str(raised.value)


def called(**call: Any) -> Json:
    function = {"name": "f", "arguments": "{}", **call.pop("function", {})}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function, **call}]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a", "annotations": []}, "b"], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a"),
    ],
)
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_content_of_any_form_is_text(role: str, content: Any, text: str) -> None:
    message = {"role": role, "content": content, "tool_call_id": "c" if role == "tool" else None}
    assert read(message).chat.messages[1].content == text


FROM_ANSWERS: list[Json] = [
    {"refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": []},
    {"reasoning": "hm", "reasoning_details": [{}], "thinking": "hm", "parsed": {"a": 1}},
    {"id": "msg_1", "type": "message", "status": "completed", "model": "gpt", "usage": {"a": 1}},
    {"token_ids": [1], "stop_reason": None, "logprobs": {}, "created_at": 1, "metadata": {}},
    {"vendor_extension": {"a": [1]}},
]


@pytest.mark.parametrize("fields", FROM_ANSWERS)
def test_fields_of_answers_come_back(fields: Json) -> None:
    message = {"role": "assistant", "content": "a", **fields}
    assert read(message).chat == read({"role": "assistant", "content": "a"}).chat


@pytest.mark.parametrize("field", ["audio", "function_call", "images", "prefix", "partial"])
def test_fields_that_change_the_prompt_are_refused(field: str) -> None:
    message = {"role": "assistant", "content": "a", field: {"id": "x"}}
    assert refused(message).startswith(f"messages[1].{field}: is not supported; ")


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_messages_of_clients_have_known_fields(role: str) -> None:
    known = {"name": "n", "id": "i", "status": "s", "timestamp": 1, "metadata": {}, "unknown": None}
    message = {"role": role, "content": "a", **({"tool_call_id": "c"} if role == "tool" else {})}
    read({**message, **known})
    wrong = refused({**message, "contents": "b"})
    assert wrong.startswith("messages[1].contents: is not supported")


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ("{}", "{}"),
        ('{"a": ', '{"a": '),
        ("", ""),
        (None, ""),
        ({"a": "é"}, '{"a": "é"}'),
    ],
)
def test_arguments_are_passed_as_they_came(arguments: Any, sent: str) -> None:
    made = read(called(function={"arguments": arguments})).chat.messages[1].tool_calls[0]
    assert made == pb.ToolCall(id="c", name="f", arguments=sent)


def test_calls_may_have_no_id_and_no_arguments() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "id": None}]}
    assert read(message).chat.messages[1].tool_calls[0] == pb.ToolCall(name="f")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (called(function={"arguments": 5}), "messages[1].tool_calls[0].function.arguments: is not"),
        (called(function={"name": None}), "messages[1].tool_calls[0].function.name: is not text"),
        (called(id=5), "messages[1].tool_calls[0].id: is not text"),
        (called(type="custom"), "messages[1].tool_calls[0]: must be"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls: is not a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0]: is not an object"),
        ({"role": "function", "content": "x"}, "messages[1].role: 'function' is not one of"),
        ({"role": "user", "content": 5}, "messages[1].content: is not text"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id: is not text"),
        (
            {"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]},
            "messages[1].content: part 1 is of type 'image_url'; send parts",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[1].content: part 0 is not text",
        ),
    ],
)
def test_what_is_wrong_is_named(message: Json, said: str) -> None:
    assert refused(message).startswith(said)


def test_metadata_are_labels() -> None:
    metadata = {"a": "x", "b": None, "c": 5, "d": 0.5, "e": True}
    request = read(metadata=metadata, user="u")
    assert request.labels == {"a": "x", "c": "5", "d": "0.5", "e": "true", "user": "u"}
    assert refused(metadata={"a": {}}) == "metadata.a: is not text"
    assert refused(metadata=[]) == "metadata: is not an object"
    assert refused(user=5) == "user: is not text"


def test_whole_numbers_may_be_written_as_floats() -> None:
    sampling = read(max_tokens=16.0, seed=7.0, top_k=3.0).sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (16, 7, 3)
    assert refused(max_tokens=16.5) == "max_tokens: is not a whole number"


@pytest.mark.parametrize("stop", [None, "", [], [""], ["", ""]])
def test_empty_stop_strings_stop_nothing(stop: Any) -> None:
    assert not read(stop=stop).sampling.stop


NO_EFFECT: list[Json] = [
    {"n": 1, "logit_bias": {}, "store": False, "service_tier": "auto", "modalities": ["text"]},
    {"verbosity": "medium", "prompt_cache_key": "k", "safety_identifier": "s", "audio": None},
    {"function_call": None, "functions": None, "tools": [], "tool_choice": "auto"},
    {"function_call": "none", "functions": [], "tool_choice": {"type": "none"}},
    {"tools": None, "parallel_tool_calls": False},
    {"vendor_extension": None, "metadata": None, "web_search_options": None},
    {"prediction": {"type": "content", "content": "yes"}, "prompt_cache_retention": "24h"},
    {"service_tier": "default", "reasoning_effort": None, "response_format": {"type": "text"}},
    {"logprobs": False, "top_logprobs": 0, "stop": []},
]


@pytest.mark.parametrize("fields", NO_EFFECT)
def test_fields_without_effect_are_ignored(fields: Json) -> None:
    request = read(**fields)
    request.ClearField("tool_choice")
    assert request == read()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop": [1]}, "stop[0]: is not text"),
        ({"stop": 1}, "stop: must be text or a list of texts"),
        ({"modalities": ["text", "audio"]}, "modalities: is not supported; leave it out"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]: is not a whole number"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]: -1 is out of range"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a: must be a token id"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1: is not a number"),
        ({"temperature": 10**400}, "temperature: 1000000000"),
        ({"reasoning_effort": 5}, "reasoning_effort: is not text"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format: "),
    ],
)
def test_errors_have_no_words_of_libraries(fields: Json, said: str) -> None:
    assert refused(**fields).startswith(said)


def test_a_schema_that_is_nested_too_deeply_is_named() -> None:
    schema: Json = {}
    for _ in range(5000):
        schema = {"a": schema}
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert refused(response_format=shape).startswith("response_format: is nested too deeply")


def test_a_completion_has_its_own_names() -> None:
    with pytest.raises(BadField, match=r"^messages: is not a field of /v1/completions"):
        request_of_body(COMPLETIONS, {"messages": [USER]}, pb.GenerateRequest())
