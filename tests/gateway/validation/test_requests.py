"""Every wrong field, by its path; and all of them in one error."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from gateway.admission.prompts import fit
from gateway.config.models import load_catalog
from gateway.identity.caller import Caller
from gateway.identity.resume_token import ResumeKey
from gateway.models.catalog import Catalog
from gateway.models.tools import FunctionTool, ToolCall
from gateway.validation.conversation import (
    MESSAGES_MAX,
    NAMED_MAX,
    Conversation,
    Turn,
    messages_of,
    opaque_id,
)
from gateway.validation.requests import ValidRequest, fingerprint_of, issued_by, validate
from sluice.errors import InvalidRequest, PromptTooLong, UnknownModel
from sluice.settings import ModelSettings
from sluice.v1.inference_pb2 import ChatInput, ChatMessage, GenerateRequest, Resume, SamplingParams
from sluice.v1.inference_pb2 import ToolCall as PbToolCall
from tests.gateway.kit.tokenizer import CONTEXT
from tests.gateway.kit.wire import RESUME_KEY, resumed, settings_for


def check(catalog: Catalog, request: GenerateRequest, timeout_s: float = 300.0) -> Any:
    return validate(request, catalog, timeout_s, Caller("default"), ResumeKey(RESUME_KEY))


def valid(catalog: Catalog, **fields: Any) -> Any:
    return check(catalog, GenerateRequest(prompt="hi", **fields))


def violations(catalog: Catalog, **fields: Any) -> list[str]:
    if "chat" not in fields:
        fields.setdefault("prompt", "hello")
    with pytest.raises(InvalidRequest) as caught:
        check(catalog, GenerateRequest(**fields))
    return [violation.field for violation in caught.value.violations]


def chat(*turns: tuple[str, str]) -> ChatInput:
    return ChatInput(
        messages=[ChatMessage(role=f"ROLE_{role.upper()}", content=text) for role, text in turns]
    )


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [1] * 33}, "stop_token_ids"),
    ({"stop_token_ids": [1], "regex": "a"}, "stop_token_ids"),
    ({"logit_bias": {3: 100.5}}, "logit_bias"),
    ({"logit_bias": {3: math.nan}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_k": 1 << 21}, "top_k"),
    ({"repetition_penalty": 0.4}, "repetition_penalty"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": ["x"] * 9}, "stop"),
    ({"stop": ["ok", ""]}, "stop[1]"),
    ({"stop": ["x" * 65]}, "stop[0]"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": math.inf}, "frequency_penalty"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": CONTEXT + 1}, "min_tokens"),
    ({"min_tokens": 1, "regex": "a"}, "min_tokens"),
    ({"min_tokens": 1, "json_schema": "{}"}, "min_tokens"),
]


@pytest.mark.parametrize(("params", "field"), SAMPLING)
def test_sampling(catalog: Catalog, params: dict[str, Any], field: str) -> None:
    assert violations(catalog, sampling=SamplingParams(**params)) == [f"sampling.{field}"]


INPUTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompt": None}, ["input"]),
    ({"prompt": ""}, ["prompt"]),
    ({"prompt": " \n"}, ["prompt"]),
    ({"chat": ChatInput()}, ["chat.messages"]),
    ({"chat": chat(*[("user", "")] * (MESSAGES_MAX + 1))}, ["chat.messages"]),
    ({"chat": chat(("unspecified", "hi"), ("user", "hi"))}, ["chat.messages[0].role"]),
    ({"chat": chat(("user", " "), ("assistant", ""))}, ["chat.messages"]),
    ({"chat": chat(("user", "hi")), "raw_prompt": True}, ["raw_prompt"]),
    ({"priority": 17}, ["priority"]),
    ({"labels": {str(i): "" for i in range(33)}}, ["labels"]),
    ({"labels": {"k" * 65: ""}}, ["labels." + "k" * 65]),
    ({"labels": {"k": "v" * 513}}, ["labels.k"]),
    ({"labels": {"": "v"}}, ["labels"]),
    ({"idempotency_key": "k" * 129}, ["idempotency_key"]),
    ({"resume": Resume(token_ids=[1 << 20])}, ["resume.token_ids"]),
    (
        {"resume": Resume(token_ids=[9, 9]), "sampling": SamplingParams(max_tokens=1)},
        ["resume.token_ids"],
    ),
    (
        {"resume": Resume(hidden_indexes=[1, 1]), "sampling": SamplingParams(max_tokens=1)},
        ["resume.token_ids"],
    ),
    ({"resume": Resume(token_ids=[9]), "sampling": SamplingParams(temperature=1)}, ["resume.seed"]),
]


@pytest.mark.parametrize(("fields", "expected"), INPUTS)
def test_other_fields(catalog: Catalog, fields: dict[str, Any], expected: list[str]) -> None:
    assert violations(catalog, **fields) == expected


def test_conversations_as_clients_send_them(catalog: Catalog) -> None:
    """System turns behind one another are one; whoever spoke last, and whatever has no text."""
    turns = [("system", "a"), ("system", ""), ("system", "b"), ("user", ""), ("assistant", "yes")]
    sent = chat(*turns, ("system", "c"))
    conversation = check(catalog, GenerateRequest(chat=sent)).conversation
    said = [(turn.role, turn.content) for turn in conversation.turns]
    assert said == [("system", "a\n\nb"), ("user", ""), ("assistant", "yes"), ("system", "c")]
    assert conversation.system_text == "a\n\nb\n\nc"


def test_all_violations_come_in_one_error(catalog: Catalog) -> None:
    params = SamplingParams(max_tokens=0, temperature=3, top_p=2)
    assert violations(catalog, prompt="", sampling=params, model="nobody") == [
        "prompt",
        "sampling.max_tokens",
        "sampling.temperature",
        "sampling.top_p",
        "model",
    ]


def test_an_unknown_model_names_the_known(catalog: Catalog) -> None:
    with pytest.raises(UnknownModel) as caught:
        valid(catalog, model="nobody")
    assert caught.value.metadata == {"models": "small, large"}
    assert "small, large" in caught.value.message


def test_messages_never_hold_the_prompt(catalog: Catalog) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(
            catalog, GenerateRequest(prompt="secret", sampling=SamplingParams(stop=["secret" * 20]))
        )
    assert "secret" not in str(caught.value)


def test_defaults_are_filled_in(catalog: Catalog) -> None:
    request: ValidRequest = valid(catalog, model="auto")
    assert request.model is None
    assert request.priority_class == "interactive"
    assert request.timeout_s == 300.0
    assert request.sampling.temperature == 0
    assert request.sampling.top_p == 1
    assert request.sampling.repetition_penalty == 1
    assert not request.sampling.HasField("seed")


def test_the_fingerprint_leaves_key_and_resume_out(catalog: Catalog) -> None:
    one = valid(catalog, idempotency_key="k")
    two = valid(catalog, resume=Resume(seed=9))
    other = check(catalog, GenerateRequest(prompt="ho", idempotency_key="k"))
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_a_greedy_answer_is_resumed_with_or_without_its_seed(catalog: Catalog) -> None:
    asked = resumed(GenerateRequest(prompt="hi", model="small"), [9, None, 9])
    assert check(catalog, asked).resume == (9, None, 9)
    asked.resume.seed = 7
    assert check(catalog, asked).resume == (9, None, 9)


def test_a_drawn_answer_is_resumed_with_its_own_seed_alone(catalog: Catalog) -> None:
    asked = GenerateRequest(
        prompt="hi", model="small", sampling=SamplingParams(temperature=1, seed=7)
    )
    held, key = [9, 10], ResumeKey(RESUME_KEY)
    token = key.token(fingerprint_of(asked), "small", 7).after(held)
    asked.resume.MergeFrom(Resume(token_ids=held, model="small", resume_token=token, seed=8))
    found = check(catalog, asked)
    assert (found.resume, found.resume_model, found.resume_version) == ((9, 10), "small", "small")
    assert found.sampling.seed == 7, "the request's own goes before that of resume"
    asked.resume.resume_token = key.token(fingerprint_of(asked), "small", 0).after(held)
    with pytest.raises(InvalidRequest) as refused:
        check(catalog, asked)
    assert [one.field for one in refused.value.violations] == ["resume.resume_token"]


def test_who_holds_nothing_needs_no_proof(catalog: Catalog) -> None:
    found = valid(catalog, resume=Resume(model="small", seed=7))
    assert (found.resume, found.resume_version, found.resume_model) == ((), "", "small")
    assert found.sampling.seed == 7


def test_tokens_are_of_a_version_of_their_model() -> None:
    asked, held = GenerateRequest(prompt="hi", model="small"), (9,)
    key = ResumeKey(RESUME_KEY)
    fingerprint, sampling = fingerprint_of(asked), SamplingParams()
    asked.resume.resume_token = key.token(fingerprint, "small-1", 0).after(held)
    for versions in (["small-2", "small-1"], ["small-1"], ["small-1", "small-2"]):
        found = issued_by(asked, held, sampling, fingerprint, key, versions)
        assert found == "small-1"
    for versions in (["small-2"], []):
        with pytest.raises(InvalidRequest):
            issued_by(asked, held, sampling, fingerprint, key, versions)


@pytest.mark.parametrize(
    ("resume", "sampling", "expected"),
    [
        ({"token_ids": [1]}, {"n": 2, "temperature": 1}, ["resume", "resume.seed"]),
        ({}, {"n": 2, "temperature": 1}, ["resume"]),
        ({"token_ids": [9, 9]}, {"max_tokens": 2}, ["resume.resume_token"]),
        ({"token_ids": [9, 9, 9]}, {"max_tokens": 2}, ["resume.token_ids"]),
        ({"token_ids": [9], "seed": 3}, {"temperature": 1}, ["resume.resume_token"]),
        ({"token_ids": [9]}, {"temperature": 1, "seed": 3}, ["resume.resume_token"]),
        ({"token_ids": [9], "model": "nobody"}, {}, ["resume.model"]),
        ({"token_ids": [9], "model": "large"}, {}, ["resume.resume_token"]),
        ({"token_ids": [-1 % 2**32]}, {}, ["resume.token_ids"]),
        ({"token_ids": [9] * (CONTEXT + 1)}, {}, ["resume.token_ids"]),
        ({"token_ids": [9] * CONTEXT}, {}, ["resume.resume_token"]),
    ],
)
def test_what_cannot_be_resumed(
    catalog: Catalog, resume: dict[str, Any], sampling: dict[str, Any], expected: list[str]
) -> None:
    fields = {"resume": Resume(**resume), "sampling": SamplingParams(**sampling)}
    assert violations(catalog, model="small", **fields) == expected


def test_answers_are_limited_by_the_setting_of_a_model(model_folder: Path) -> None:
    small = ModelSettings(name="short", path=str(model_folder), max_answer_tokens=9)
    catalog = load_catalog(settings_for(model_folder, more_models=[small]))
    assert violations(catalog, model="short", sampling=SamplingParams(max_tokens=10)) == [
        "sampling.max_tokens"
    ]
    assert fit(valid(catalog, model="short"), catalog["short"], 1).max_tokens == 9


def test_lengths_are_cut_to_what_the_context_has_room_for(catalog: Catalog) -> None:
    asked, without = SamplingParams(max_tokens=100, min_tokens=100), SamplingParams()
    for params, prompt, lengths in (
        (asked, 10, (100, 100)),
        (asked, CONTEXT - 5, (5, 5)),
        (without, 10, (CONTEXT - 10, 0)),
    ):
        sampling = fit(valid(catalog, sampling=params), catalog["small"], prompt)
        assert (sampling.max_tokens, sampling.min_tokens) == lengths
    with pytest.raises(PromptTooLong, match=str(CONTEXT)) as caught:
        fit(valid(catalog), catalog["small"], CONTEXT)
    assert caught.value.metadata == {"prompt_tokens": str(CONTEXT), "context_tokens": str(CONTEXT)}


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"min_p": 0.5, "presence_penalty": -0.5, "frequency_penalty": 0.25, "min_tokens": 3}, {}),
        ({"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "seed": 5}, {}),
        ({"json_schema": "{}"}, {}),
        ({"regex": ""}, {}),
        ({"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"top_p": 0}, {"top_p": pytest.approx(1e-6, rel=9)}),
    ],
)
def test_sampling_parameters_travel(
    catalog: Catalog, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    sampling = fit(valid(catalog, sampling=SamplingParams(**params)), catalog["small"], 10)
    for name, value in (fields or params).items():
        assert getattr(sampling, name) == pytest.approx(value)
    assert sampling.WhichOneof("constraint") in (None, *params)
    assert list(sampling.stop_token_ids) == sorted(catalog["small"].tokenizer.stop_token_ids)


def test_of_many_wrong_fields_the_first_are_named(catalog: Catalog) -> None:
    request = GenerateRequest(chat=chat(*[("unspecified", "x")] * 100))
    with pytest.raises(InvalidRequest, match="; and 84 more") as caught:
        check(catalog, request)
    assert len(caught.value.violations) == NAMED_MAX


def test_a_constraint_needs_a_model_that_can_end(catalog: Catalog) -> None:
    model = catalog["small"]
    endless = replace(model, tokenizer=replace(model.tokenizer, stop_token_ids=frozenset()))
    free = valid(catalog)
    assert fit(free, endless, 10)
    request = valid(catalog, sampling=SamplingParams(regex="a"))
    with pytest.raises(InvalidRequest, match="no token that ends") as caught:
        fit(request, endless, 10)
    assert [violation.field for violation in caught.value.violations] == ["sampling.regex"]


def test_biases_are_of_the_model_that_the_request_names(catalog: Catalog) -> None:
    params = SamplingParams(logit_bias={3: 1.5})
    named = valid(catalog, model="small", sampling=params)
    assert dict(fit(named, catalog["small"], 10).logit_bias) == {3: 1.5}
    routed = valid(catalog, sampling=params)
    with pytest.raises(InvalidRequest, match="name it in model"):
        fit(routed, catalog["small"], 10)
    beyond = valid(catalog, model="small", sampling=SamplingParams(logit_bias={1 << 30: 1.0}))
    with pytest.raises(InvalidRequest, match="vocabulary of small"):
        fit(beyond, catalog["small"], 10)


@pytest.mark.parametrize(("seconds", "coalesce_ms"), [(0.0, 0), (0.2504, 250), (3600.0, 3_600_000)])
def test_how_long_tokens_are_gathered(catalog: Catalog, seconds: float, coalesce_ms: int) -> None:
    gather = Duration(seconds=int(seconds), nanos=round(1e9 * (seconds % 1)))
    asked, unset = GenerateRequest(prompt="a", gather=gather), GenerateRequest(prompt="a")
    assert check(catalog, asked).coalesce_ms == coalesce_ms
    assert check(catalog, unset).coalesce_ms is None
    # It says how the answer travels, not what it is.
    assert check(catalog, asked).fingerprint == check(catalog, unset).fingerprint


@pytest.mark.parametrize("seconds", [-1, 3601])
def test_tokens_are_gathered_for_an_hour_at_most(catalog: Catalog, seconds: int) -> None:
    assert violations(catalog, gather=Duration(seconds=seconds)) == ["gather"]


def test_other_texts_take_the_places_of_those_that_callers_wrote() -> None:
    said = Conversation(
        (Turn("user", "u"),), False, query="q", documents=("d", "e"), answers=("a",)
    )
    assert said.texts == ["u", "q", "d", "e", "a"]
    changed = said.with_texts([text.upper() for text in said.texts])
    assert changed.texts == ["U", "Q", "D", "E", "A"]
    assert (changed.turns[0].content, changed.query, changed.documents) == ("U", "Q", ("D", "E"))
    assert (changed.answers, changed.user_text) == (("A",), "U\nQ\nD\nE")
    assert replace(said, query="").with_texts(["1", "2", "3", "4"]).documents == ("2", "3")


def test_numbers_names_and_ids_of_calls_are_texts() -> None:
    arguments = {"card": 4111111111111111, "as": [4.111111111111111e15, 12, 0.5, True]}
    tool = FunctionTool("pay", "Pays.", {"enum": [4111111111111111], "const": 20.5})
    turn = Turn("assistant", "", (ToolCall("id-1", "pay", arguments),))
    conversation = Conversation((turn,), False, tools=(tool,))
    card = "4111111111111111"
    assert conversation.texts == ["", "card", card, "as", card, "Pays.", card, "pay", "id-1"]
    assert conversation.with_texts(conversation.texts) == conversation
    changed = conversation.with_texts([one.replace(card, "<C>") for one in conversation.texts])
    assert changed.turns[0].calls[0].arguments == {"card": "<C>", "as": ["<C>", 12, 0.5, True]}
    assert changed.tools[0].parameters["enum"] == ["<C>"]


def test_a_name_that_the_policy_would_edit_is_refused() -> None:
    turn = Turn("assistant", "", (ToolCall("id-1", "pay", {}),))
    conversation = Conversation((turn,), False)
    with pytest.raises(InvalidRequest, match=r"chat\.messages: the safety policy redacts"):
        conversation.with_texts([one.replace("pay", "<PAY>") for one in conversation.texts])


def test_ids_that_the_policy_would_edit_get_others() -> None:
    turns = (Turn("assistant", "", (ToolCall("id-1", "pay", {}),)), Turn("tool", "x", (), "id-1"))
    conversation = Conversation(turns, False)
    changed = conversation.with_texts([one.replace("id-1", "<ID>") for one in conversation.texts])
    assert changed.turns[0].calls[0].id == changed.turns[1].call_id == opaque_id("id-1")


CUT = ('{"value": ', '{"a": 1}{"b": 2}', "[1]", '{"a": NaN}', '{"a": ' * 64 + "1" + "}" * 64)
ARGUMENTS: list[tuple[str, Any]] = [
    *((text, text) for text in CUT),
    ("", {}),
    ("null", {}),
    ("{}", {}),
    ('{"text": "a\tb"}', {"text": "a\tb"}),
]


@pytest.mark.parametrize(("text", "arguments"), ARGUMENTS)
def test_arguments_that_are_no_object_stay_as_text(
    catalog: Catalog, text: str, arguments: Any
) -> None:
    [call] = history(catalog, "call_1", arguments=text)[0].calls
    assert call.arguments == arguments


IDS = ("call_1", "", "toolu/01==", "a b", "é" * 512, "call_x__thought__" + "Q" * 490)


@pytest.mark.parametrize("call_id", IDS)
def test_calls_have_ids_of_any_form(catalog: Catalog, call_id: str) -> None:
    assistant, tool = history(catalog, call_id)
    assert assistant.calls[0].id == tool.call_id
    assert tool.call_id == call_id or tool.call_id == opaque_id(call_id)
    assert messages_of((assistant, tool), None)[1]["name"] == "look_up"


def history(catalog: Catalog, call_id: str, arguments: str = "{}") -> tuple[Turn, ...]:
    call = PbToolCall(id=call_id, name="look_up", arguments=arguments)
    turns = [
        ChatMessage(role="ROLE_ASSISTANT", tool_calls=[call]),
        ChatMessage(role="ROLE_TOOL", tool_call_id=call_id, content="x"),
    ]
    turned: tuple[Turn, ...] = check(
        catalog, GenerateRequest(chat=ChatInput(messages=turns))
    ).conversation.turns
    return turned
