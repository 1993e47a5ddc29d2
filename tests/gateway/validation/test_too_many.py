"""A request with too many of anything is refused for that alone, before each of them is looked at or copied."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog
from gateway.validation import requests as texts
from gateway.validation.conversation import FieldViolations
from gateway.validation.requests import MOST, check_labels, sampling_of
from sluice.defaults import LABELS_MAX
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


def test_labels() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_labels({f"{at}" * 999: "x" for at in range(LABELS_MAX + 1)})
    assert [one.description for one in refused.value.violations] == [
        f"has more than {LABELS_MAX} entries"
    ]


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
    with pytest.raises(InvalidRequest) as refused:
        found.raise_if_any()
    assert [one.field for one in refused.value.violations] == [f"sampling.{field}"]
    assert not getattr(sampling, field)
