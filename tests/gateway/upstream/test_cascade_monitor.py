"""When an answer is kept, and when it is in doubt."""

import math

import numpy as np
import pytest

from gateway.routing.learned.model import Estimate
from gateway.routing.prediction import CASCADE, HeadKey, LearnedHead
from gateway.streaming.answer import Decision
from gateway.upstream.cascade import DECIDE_TOKENS, AnswerMonitor
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.routing import CascadeRoute


def route(**fields: object) -> CascadeRoute:
    values = {"first": "small", "second": "large", "commit_tokens": 8, **fields}
    return CascadeRoute.model_validate(values)


def watch(wants_json: bool = False, **fields: object) -> AnswerMonitor:
    return AnswerMonitor(route(**fields), "prompt", wants_json=wants_json)


def sure(count: int, logprob: float = -0.01) -> list[Logprobs]:
    other = math.log(max(1e-9, 1 - math.exp(logprob)))
    one = Logprobs(logprob=logprob, top_token_ids=[1, 2], top_logprobs=[logprob, other])
    return [one] * count


def test_it_is_promised_at_the_commit_point() -> None:
    made = watch()
    assert made.push(sure(7)) is Decision.PENDING
    assert made.push(sure(1)) is Decision.COMMIT
    assert made.reason == ""


def test_a_low_mean_is_doubt_but_not_before_it_says_something() -> None:
    made = watch()
    assert made.push(sure(DECIDE_TOKENS - 1, -3.0)) is Decision.PENDING
    assert made.push(sure(1, -3.0)) is Decision.ESCALATE
    assert "mean log-probability -3.00 of 4 tokens" in made.reason


def test_a_narrow_choice_is_doubt_where_margins_are_watched() -> None:
    narrow = Logprobs(
        logprob=math.log(0.5), top_token_ids=[1, 2], top_logprobs=[math.log(0.5), math.log(0.45)]
    )
    assert watch(min_margin=0.1).push([*sure(4), narrow]) is Decision.ESCALATE
    assert watch().push([*sure(4), narrow]) is Decision.PENDING


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
    verdict = made.end(text, truncated=truncated)
    assert verdict is (Decision.ESCALATE if reason else Decision.COMMIT)
    assert reason in made.reason
    assert "2 + 2" not in made.reason


def test_json_is_checked_only_where_it_was_asked_for() -> None:
    assert watch(wants_json=True).end('{"a": 1', truncated=False) is Decision.ESCALATE
    assert watch(wants_json=True).end('{"a": 1}', truncated=False) is Decision.COMMIT
    assert watch().end('{"a": 1', truncated=False) is Decision.COMMIT


@pytest.mark.parametrize(
    ("check", "text", "truncated"),
    [
        ("finished", "and so", True),
        ("json", "{", False),
        ("sums", "2 + 2 = 5", False),
    ],
)
def test_checks_can_be_left_out(check: str, text: str, truncated: bool) -> None:
    for checks, verdict in (((check,), Decision.ESCALATE), ((), Decision.COMMIT)):
        made = AnswerMonitor(route(checks=checks), "prompt", wants_json=True)
        assert made.end(text, truncated=truncated) is verdict


def test_the_learned_part_has_the_last_word() -> None:
    def score(_: str, answer: str) -> Estimate:
        return Estimate(0.2 if answer == "bad" else 0.1, 0.5, 0.7)

    by = HeadKey("routing", "v1", CASCADE)
    head = LearnedHead(by, ("small", "large"), score, 0.2, np.zeros(1, np.float32))
    for text, verdict in (("bad", Decision.ESCALATE), ("good", Decision.COMMIT)):
        made = AnswerMonitor(route(), "prompt", wants_json=False, predictor=head)
        assert made.end(text, truncated=False) is verdict
        assert made.score is not None
        assert made.score.by == by
