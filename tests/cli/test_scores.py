"""Scores of cells and models, and what a model saves beside the strong one."""

import pytest

from cli.questions import Result, tabulate, trades
from sluice.client import ModelUsage, Usage


def leg(model: str, prompt: int, answer: int) -> ModelUsage:
    usage = Usage(prompt_tokens=prompt, completion_tokens=answer)
    return ModelUsage(model=model, usage=usage)


RESULTS = [
    Result("large", "sort", "easy", True, "large", (leg("large", 10, 10),), "", 0.1, 0.2),
    Result("large", "sort", "easy", True, "large", (leg("large", 10, 20),), "", 0.1, 0.2),
    Result("large", "total", "hard", False, "large", (leg("large", 10, 40),), "", 0.1, 0.2),
    Result("auto", "sort", "easy", True, "small", (leg("small", 10, 12),), "", 0.1, 0.3),
    Result(
        *("auto", "sort", "easy", False, "large", (leg("small", 10, 3), leg("large", 10, 20))),
        *("", 0.3, 0.5),
    ),
    Result("auto", "total", "hard", error="ENGINE_FAILED: row lost"),
]


def test_scores_of_cells_and_models() -> None:
    sort, total, whole = tabulate(RESULTS)[3:]
    assert (sort["model"], sort["kind"], sort["level"], sort["n"]) == ("auto", "sort", "easy", 2)
    assert (sort["right_share"], sort["escalated_share"]) == (0.5, 0.5)
    assert sort["tokens"] == {"small": 35, "large": 30}
    assert sort["answer_tokens"] == {"small": 15, "large": 20}
    assert sort["answers"] == {"small": 1, "large": 1}
    assert sort["ttft_ms"]["p50"] == pytest.approx(100)
    assert sort["latency_ms"]["p95"] == pytest.approx(500)
    assert (total["right_share"], total["tokens"], total["latency_ms"]["p99"]) == (0.0, {}, None)
    assert (whole["kind"], whole["n"]) == ("all", 3)
    assert whole["right_share"] == pytest.approx(1 / 3)
    assert (whole["errors"], whole["answers"]) == (1, {"small": 1, "large": 1})


def test_a_trade_compares_with_the_strong_model_alone() -> None:
    (auto,) = trades(tabulate(RESULTS), "large")
    assert (auto["model"], auto["strong"]) == ("auto", "large")
    assert auto["right_share"] == pytest.approx(0.5)
    assert auto["token_share"] == pytest.approx(30 / 100)
    assert auto["answer_token_share"] == pytest.approx(20 / 70)
    assert trades(tabulate(RESULTS), "huge") == []


def test_a_strong_model_without_right_answers_has_no_share() -> None:
    wrong = [Result("large", "a", "b"), Result("auto", "a", "b", True)]
    (auto,) = trades(tabulate(wrong), "large")
    assert auto["right_share"] is auto["token_share"] is None
