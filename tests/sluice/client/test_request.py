"""Arguments that cannot travel are named; everything else is the gateway's to judge."""

from typing import Any

import pytest

from sluice.client import ToolCall
from sluice.client.request import Audio, Message, Tool, count_request, generate_request
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb

NOT_UTF8 = "caf\udce9"


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (NOT_UTF8, {}, "prompt"),
        ([Message("user", NOT_UTF8)], {}, "chat.messages[0].content"),
        ([Message("robot", "hi")], {}, "chat.messages[0].role"),  # type: ignore[arg-type]
        ("p", {"model": NOT_UTF8}, "model"),
        ("p", {"max_tokens": -1}, "sampling.max_tokens"),
        ("p", {"max_tokens": 2**32}, "sampling.max_tokens"),
        ("p", {"seed": 2**64}, "sampling.seed"),
        ("p", {"stop": [NOT_UTF8]}, "sampling.stop"),
        ("p", {"labels": {"team": NOT_UTF8}}, "labels.team"),
        ("p", {"idempotency_key": NOT_UTF8}, "idempotency_key"),
        ("p", {"priority": "urgent"}, "priority"),
        ("p", {"temperature": "warm"}, "sampling.temperature"),
        ("p", {"min_tokens": -1}, "sampling.min_tokens"),
        ("p", {"regex": NOT_UTF8}, "sampling.regex"),
        ("p", {"json_schema": {"a": object()}}, "sampling.json_schema"),
        ("p", {"json_schema": "{}", "regex": "a"}, "sampling.regex"),
        ("p", {"gather_s": "long"}, "gather"),
        ("p", {"tools": [Tool(NOT_UTF8)]}, "tools"),
        ("p", {"tools": [Tool("f", "", {"a": object()})]}, "tools"),
        ("p", {"tool_choice": NOT_UTF8}, "tool_choice.function"),
        ([Message("tool", "x", tool_call_id=NOT_UTF8)], {}, "chat.messages[0].tool_call_id"),
        ("p", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ("p", {"gather_s": float("nan")}, "gather"),
        ("p", {"gather_s": float("inf")}, "gather"),
        ("p", {"temperature": 10**400}, "sampling.temperature"),
    ],
)
def test_value_that_cannot_travel_is_named(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, options)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_what_is_only_wrong_is_left_to_the_gateway() -> None:
    request = generate_request("", {"max_tokens": 0, "temperature": -1.0})
    assert request.WhichOneof("input") == "prompt"
    assert request.sampling.HasField("max_tokens")
    assert request.sampling.temperature == -1.0


@pytest.mark.parametrize("gather_s", [0.0, 0.25, 3600.0])
def test_how_long_tokens_are_gathered_travels_as_it_is(gather_s: float) -> None:
    request = generate_request("p", {"gather_s": gather_s})
    assert request.HasField("gather")
    assert request.gather.ToTimedelta().total_seconds() == gather_s


def test_tools_and_calls_travel() -> None:
    made = ToolCall(id="call_1", name="f", arguments="{}")
    turns = [
        Message("user", "go"),
        Message("assistant", "", [made]),
        Message("tool", "done", tool_call_id="call_1"),
    ]
    request = generate_request(
        turns, {"tools": [Tool("f", "d", {"type": "object"})], "tool_choice": "f"}
    )
    assert request.tools[0] == pb.Tool(name="f", description="d", parameters='{"type": "object"}')
    assert request.tool_choice.function == "f"
    assert request.chat.messages[1].tool_calls[0] == pb.ToolCall(
        id="call_1", name="f", arguments="{}"
    )
    assert request.chat.messages[2].tool_call_id == "call_1"
    modes = {
        word: generate_request("p", {"tool_choice": word}).tool_choice.mode
        for word in ("none", "auto", "required")
    }
    assert modes == {"none": 1, "auto": 2, "required": 3}
    assert generate_request("p", {"logit_bias": {3: -1.5}}).sampling.logit_bias[3] == -1.5


def test_every_option_travels() -> None:
    sampling: Any = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "seed": 11,
        "stop": ["END"],
        "logprobs": 2,
        "regex": "a",
    }
    options: Any = {"priority": "bulk", "labels": {"team": "desk"}, "idempotency_key": "mine"}
    turns = [Message("system", "s"), Message("user", "u")]
    request = generate_request(turns, sampling | options)
    assert [turn.role for turn in request.chat.messages] == [pb.ROLE_SYSTEM, pb.ROLE_USER]
    assert request.sampling == pb.SamplingParams(**sampling)
    assert (request.priority, dict(request.labels)) == (pb.PRIORITY_BULK, {"team": "desk"})
    assert request.idempotency_key == "mine"


def test_unset_options_stay_unset() -> None:
    request = generate_request("p", {})
    assert not request.sampling.ListFields()
    assert request.model == "auto"


def test_each_request_has_a_key_of_its_own() -> None:
    keys = {generate_request("p", {}).idempotency_key for _ in range(3)}
    assert len(keys) == 3


@pytest.mark.parametrize("schema", ['{"type": "null"}', {"type": "null"}])
def test_a_schema_may_be_text_or_an_object(schema: Any) -> None:
    request = generate_request("p", {"json_schema": schema})
    assert request.sampling.json_schema == '{"type": "null"}'


def test_speech_is_for_generate_alone() -> None:
    request = generate_request(Audio(b"\x01\x02", language="en", pcm=True), {})
    assert (request.audio.format, request.audio.language) == (pb.AUDIO_FORMAT_PCM, "en")
    with pytest.raises(InvalidRequest, match="not audio"):
        count_request(Audio(b""), "small", False)
