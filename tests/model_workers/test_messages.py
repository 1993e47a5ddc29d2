import math
from typing import Any

import pytest

from model_workers.engine.protocol import Sampling
from model_workers.messages import sequence_spec
from sluice.errors import InvalidRequest
from sluice.internal.v1 import worker_pb2
from tests.support.sequences import wire_row


def row_of(sampling: dict[str, Any], **fields: Any) -> worker_pb2.BatchedTask:
    row = wire_row(fields.pop("name", "r"), **fields)
    for field, value in sampling.items():
        setattr(row.task.sampling, field, value)
    return row


def test_a_task_of_the_wire_becomes_a_spec() -> None:
    row = wire_row("r", [1, 2], max_tokens=9, attempt=3, timeout_ms=1500, produced=[7], stop=[4])
    row.task.tenant = "acme"
    spec = sequence_spec(row, "batcher-1", now=100.0)
    assert (spec.request_id, spec.owner, spec.attempt) == ("r", "batcher-1", 3)
    assert (spec.tenant, spec.prompt, spec.produced) == ("acme", (1, 2), (7,))
    assert spec.deadline == 101.5
    assert spec.sampling == Sampling(9, stop_token_ids=frozenset({4}))
    assert sequence_spec(wire_row("r"), "batcher-1", now=100.0).deadline is None


@pytest.mark.parametrize(("name", "rank"), [("interactive", 0), ("standard", 1), ("bulk", 2)])
def test_the_class_is_the_rank(name: str, rank: int) -> None:
    assert sequence_spec(wire_row("r", priority_class=name), "b", 0.0).rank == rank


@pytest.mark.parametrize(
    ("sent", "arrived"),
    [
        ({"top_logprobs": 3}, {}),
        ({"top_logprobs": 3, "logprobs": True}, {"top_logprobs": 3, "logprobs": True}),
        (fields := {"min_p": 0.5, "min_tokens": 2}, fields),
        (fields := {"presence_penalty": -0.5, "frequency_penalty": 0.25}, fields),
        (fields := {"json_schema": ""}, fields),
        (fields := {"regex": ""}, fields),
    ],
    ids=str,
)
def test_sampling_arrives(sent: dict[str, Any], arrived: dict[str, Any]) -> None:
    spec = sequence_spec(row_of(sent, stop=[4]), "b", 0.0)
    assert spec.sampling == Sampling(4, stop_token_ids=frozenset({4}), **arrived)


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
    with pytest.raises(InvalidRequest, match=field):
        sequence_spec(row_of({field: value}), "b", 0.0)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (row_of({}, name=""), "request_id"),
        (row_of({}, prompt=[]), "the prompt has no tokens"),
        (row_of({}, priority_class="urgent"), "interactive, standard, bulk"),
        (row_of({"regex": "a"}), "stop_token_ids"),
        (row_of({"regex": "a", "min_tokens": 1}, stop=[4]), "min_tokens"),
    ],
    ids=["no id", "no prompt", "class", "endless constraint", "constraint with min_tokens"],
)
def test_tasks_without_sense_are_refused(row: worker_pb2.BatchedTask, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        sequence_spec(row, "b", 0.0)


def test_more_scored_tokens_than_the_prompt_has_are_refused() -> None:
    row = wire_row("r", [5, 6])
    row.task.values.scored_token_ids.extend((1, 2, 3))
    with pytest.raises(InvalidRequest, match="more tokens are to be scored"):
        sequence_spec(row, "b", 0.0)
