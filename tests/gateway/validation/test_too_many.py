"""A request with too many of anything is refused for that alone, before each of them is looked at or copied."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog
from gateway.validation import texts
from gateway.validation.conversation import CALLS_MAX, FieldViolations
from gateway.validation.options import TOOLS_MAX
from gateway.validation.requests import MOST, check_labels, sampling_of, validate
from sluice.defaults import LABELS_BYTES_MAX, LABELS_MAX
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb

MANY = [""] * (texts.TEXTS_MAX + 1)
TEXTS: list[tuple[Callable[..., Any], Any, str]] = [
    (texts.validate_embed, pb.EmbedRequest(texts=MANY), "texts"),
    (texts.validate_rerank, pb.RerankRequest(query="a", documents=MANY), "documents"),
    (texts.validate_score, pb.ScoreRequest(prompt="a", answers=MANY), "answers"),
]


@pytest.mark.parametrize(
    ("validate", "request_", "field"), TEXTS, ids=[field for *_, field in TEXTS]
)
def test_texts(validate: Callable[..., Any], request_: Any, field: str, catalog: Catalog) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(request_, catalog, 300.0, Caller("acme"))
    assert [one.field for one in refused.value.violations] == [field]


@pytest.mark.parametrize("messages", [1, 2])
def test_calls_of_tools_are_counted_unread(messages: int, catalog: Catalog) -> None:
    calls = [pb.ToolCall(arguments="no JSON")] * (CALLS_MAX // messages + 1)
    said = pb.ChatMessage(role=pb.ROLE_ASSISTANT, tool_calls=calls)
    request = pb.CountTokensRequest(chat=pb.ChatInput(messages=[said] * messages))
    with pytest.raises(InvalidRequest) as refused:
        texts.validate_count(request, catalog, 300.0, Caller("acme"))
    assert [(one.field, one.description) for one in refused.value.violations] == [
        ("chat.messages", f"must have at most {CALLS_MAX} tool_calls in all")
    ]


def test_tools_are_counted_unread(catalog: Catalog) -> None:
    tools = [pb.Tool(name="f", parameters="no JSON")] * (TOOLS_MAX + 1)
    with pytest.raises(InvalidRequest) as refused:
        validate(pb.GenerateRequest(prompt="a", tools=tools), catalog, 300.0, Caller("a"), None)
    assert [one.field for one in refused.value.violations] == ["tools"]


LABELS: list[tuple[dict[str, str], list[str]]] = [
    (
        {f"{at}" * 999: "x" for at in range(LABELS_MAX + 1)},
        [f"must have at most {LABELS_MAX} entries"],
    ),
    ({f"{at:064}": "x" * 256 for at in range(LABELS_MAX)}, []),  # as many as ASCII can have
    (
        {f"{at}": "\u754c" * 256 for at in range(LABELS_MAX)},
        [f"must have at most {LABELS_BYTES_MAX} bytes in keys and values together"],
    ),
]


@pytest.mark.parametrize(("labels", "expected"), LABELS, ids=["entries", "fit", "bytes"])
def test_labels_are_bounded(labels: dict[str, str], expected: list[str]) -> None:
    found = FieldViolations()
    check_labels(labels, found)
    assert [one.description for one in found] == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * (MOST["stop"][0] + 1)),
        ("stop_token_ids", [1] * (MOST["stop_token_ids"][0] + 1)),
        ("logit_bias", dict.fromkeys(range(MOST["logit_bias"][0] + 1), 1e9)),
    ],
)
def test_sampling(field: str, value: Any) -> None:
    found = FieldViolations()
    sampling = sampling_of(pb.SamplingParams(temperature=9.0, **{field: value}), 100, found)
    assert [one.field for one in found] == [f"sampling.{field}"]
    assert not getattr(sampling, field)
