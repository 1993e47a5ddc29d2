"""When an answer is kept, and when it is in doubt."""

import numpy as np
import pytest

from gateway.routing.learned.model import Estimate, HeadKey, LearnedHead
from gateway.upstream.cascade import DECIDE_TOKENS, AnswerMonitor
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.routing import CascadeRoute
from sluice.v1.admin_pb2 import ROUTER_HEAD_CASCADE


def route(**fields: object) -> CascadeRoute:
    values = {"first": "small", "second": "large", "commit_tokens": 8, **fields}
    return CascadeRoute.model_validate(values)


def watch(wants_json: bool = False, **fields: object) -> AnswerMonitor:
    return AnswerMonitor(route(**fields), "prompt", wants_json=wants_json)


def sure(count: int, logprob: float = -0.01) -> list[Logprobs]:
    return [Logprobs(logprob=logprob)] * count


def test_it_is_promised_at_the_commit_point() -> None:
    made = watch()
    made.push(sure(7))
    assert not made.decided
    made.push(sure(1))
    assert (made.committed, made.reason) == (True, "")


def test_a_low_mean_is_doubt_but_not_before_it_says_something() -> None:
    made = watch()
    made.push(sure(DECIDE_TOKENS - 1, -3.0))
    assert not made.decided
    made.push(sure(1, -3.0))
    assert not made.committed
    assert "mean log-probability -3 of 4 tokens" in made.reason


def test_a_doubt_is_never_rounded_away() -> None:
    made = watch(min_logprob=-0.03)
    made.push(sure(DECIDE_TOKENS, -0.03004))
    assert "mean log-probability -0.03004 of 4 tokens is below -0.03" in made.reason


@pytest.mark.parametrize(
    ("text", "truncated", "reason"),
    [
        ("2 + 2 = 4", False, ""),
        ("2 + 2 = 5", False, "does not add up"),
        ("2 + 2 =", True, "unfinished"),
    ],
)
def test_an_answer_that_ends_early_is_checked_whole(
    text: str, truncated: bool, reason: str
) -> None:
    made = watch()
    made.push(sure(3))
    made.end(text, truncated=truncated)
    assert made.committed is not bool(made.reason)
    assert bool(made.reason) is bool(reason)
    assert reason in made.reason
    assert "2 + 2" not in made.reason


def test_json_is_checked_only_where_it_was_asked_for() -> None:
    for wants_json, text, kept in (
        (True, '{"a": 1', False),
        (True, "{}", True),
        (False, "{", True),
    ):
        made = watch(wants_json=wants_json)
        made.end(text, truncated=False)
        assert made.committed is kept


@pytest.mark.parametrize(
    ("check", "text", "truncated"),
    [("finished", "and so", True), ("json", "{", False), ("sums", "2 + 2 = 5", False)],
)
def test_checks_can_be_left_out(check: str, text: str, truncated: bool) -> None:
    for checks in ((check,), ()):
        made = AnswerMonitor(route(checks=checks), "prompt", wants_json=True)
        made.end(text, truncated=truncated)
        assert made.committed is not bool(checks)


def test_the_learned_part_has_the_last_word() -> None:
    def score(_: str, answer: str) -> Estimate:
        return Estimate(0.2 if answer == "bad" else 0.1, 0.5, 0.7)

    by = HeadKey("routing", "v1", ROUTER_HEAD_CASCADE)
    head = LearnedHead(by, ("small", "large"), score, 0.2, np.zeros(1, np.float32))
    for text in ("bad", "good"):
        made = AnswerMonitor(route(), "prompt", wants_json=False, predictor=head)
        made.end(text, truncated=False)
        assert made.committed is (text == "good")
        assert made.score is not None
        assert (made.score.policy, made.score.version, made.score.head) == by
