import math

import pytest

from model_workers.engine.protocol import (
    Sampling,
)
from model_workers.messages import sequence_spec
from sluice.errors import InvalidRequest
from tests.support.sequences import wire_row


def test_a_row_of_the_wire_becomes_a_spec() -> None:
    row = wire_row("r", [1, 2], max_tokens=9, attempt=3, timeout_ms=1500, produced=[7], stop=[4])
    row.task.tenant = "acme"
    spec = sequence_spec(row, "batcher-1", now=100.0)
    assert (spec.request_id, spec.owner, spec.attempt) == ("r", "batcher-1", 3)
    assert spec.tenant == "acme"
    assert (spec.prompt, spec.produced, spec.deadline) == ((1, 2), (7,), 101.5)
    assert spec.sampling == Sampling(9, stop_token_ids=frozenset({4}))


@pytest.mark.parametrize(("name", "rank"), [("interactive", 0), ("standard", 1), ("bulk", 2)])
def test_the_class_is_the_rank(name: str, rank: int) -> None:
    assert sequence_spec(wire_row("r", priority_class=name), "b", 0.0).rank == rank


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="interactive, standard, bulk"):
        sequence_spec(wire_row("r", priority_class="urgent"), "b", 0.0)


def test_no_timeout_is_no_deadline() -> None:
    assert sequence_spec(wire_row("r"), "batcher-1", now=100.0).deadline is None


def test_alternatives_without_logprobs_are_not_asked_for() -> None:
    row = wire_row("r")
    row.task.sampling.top_logprobs = 3
    assert sequence_spec(row, "b", 0.0).sampling.top_logprobs == 0
    row.task.sampling.logprobs = True
    assert sequence_spec(row, "b", 0.0).sampling.top_logprobs == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("top_logprobs", 33),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", -101),
        ("min_tokens", 5),
    ],
)
def test_values_that_cannot_be_computed_with_are_refused(field: str, value: float) -> None:
    row = wire_row("r")
    setattr(row.task.sampling, field, value)
    with pytest.raises(InvalidRequest, match=field):
        sequence_spec(row, "b", 0.0)


def test_a_row_needs_a_request_id() -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        sequence_spec(wire_row(""), "b", 0.0)


def test_a_row_needs_a_prompt() -> None:
    with pytest.raises(InvalidRequest, match="the prompt has no tokens"):
        sequence_spec(wire_row("r", []), "b", 0.0)


def test_more_scored_tokens_than_the_prompt_has_are_refused() -> None:
    row = wire_row("r", [5, 6])
    row.task.values.scored_token_ids.extend((1, 2, 3))
    with pytest.raises(InvalidRequest, match="more tokens are to be scored"):
        sequence_spec(row, "b", 0.0)


def test_all_of_sampling_arrives() -> None:
    row = wire_row("r", stop=[4])
    sampling = row.task.sampling
    sampling.min_p, sampling.min_tokens = 0.5, 2
    sampling.presence_penalty, sampling.frequency_penalty = -0.5, 0.25
    assert sequence_spec(row, "b", 0.0).sampling == Sampling(
        4,
        stop_token_ids=frozenset({4}),
        min_p=0.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        min_tokens=2,
    )


@pytest.mark.parametrize("field", ["json_schema", "regex"])
def test_constraints_arrive(field: str) -> None:
    row = wire_row("r", stop=[4])
    setattr(row.task.sampling, field, "")
    sampling = sequence_spec(row, "b", 0.0).sampling
    assert [sampling.json_schema, sampling.regex] == ["" if field == f else None for f in FIELDS]


FIELDS = ("json_schema", "regex")


def test_a_constraint_needs_a_stop_token_and_no_min_tokens() -> None:
    row = wire_row("r")
    row.task.sampling.regex = "a"
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        sequence_spec(row, "b", 0.0)
    row.task.sampling.stop_token_ids.append(4)
    row.task.sampling.min_tokens = 1
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sequence_spec(row, "b", 0.0)
