"""What strategies give and cost, out of graded answers."""

from pathlib import Path

import pytest

from bench.support import tier_runs
from bench.support.tradeoffs import Tradeoff, draw, table, tradeoffs
from cli.questions import Result
from sluice.client import ModelUsage, Usage

PRICES = {"small": 0.1, "large": 1.0}


def leg(model: str, answer: int) -> ModelUsage:
    return ModelUsage(model=model, usage=Usage(prompt_tokens=10, completion_tokens=answer))


def result(asked: str, right: bool, *legs: ModelUsage, ms: float = 100) -> Result:
    return Result(
        asked,
        *("sort", "easy", right, legs[-1].model, legs),
        ttft_s=ms / 2_000,
        latency_s=ms / 1_000,
    )


def played() -> dict[str, list[list[Result]]]:
    """Three rounds of two questions: the first is hard; the cascade asks both models about it."""
    easy, hard = leg("small", 5), leg("large", 30)
    return {
        "small": [[result("small", False, easy), result("small", True, easy)]] * 3,
        "large": [[result("large", True, hard), result("large", True, leg("large", 10))]] * 3,
        "cascade-judged": [
            [result("c", True, easy, hard, ms=ms), result("c", True, easy, ms=ms)]
            for ms in (100, 900, 300)
        ],
    }


def test_each_strategy_beside_the_strong_model() -> None:
    small, large, cascade = tradeoffs(played(), "large", PRICES)
    assert (small.accuracy, small.accuracy_share, small.token_share) == (0.5, 0.5, 0.0)
    assert small.accuracy_band[0] < 0.5 < small.accuracy_band[1]
    assert (large.accuracy_share, large.accuracy_band) == (1.0, (1.0, 1.0))
    assert large.token_share == large.answer_token_share == 1.0
    assert cascade.token_share == pytest.approx(40 / 60)
    assert cascade.answer_token_share == pytest.approx(30 / 40)
    assert cascade.escalated_share == 0.5
    # Of a thousand questions: half of them 15 small and 40 large tokens, half of them 15 small ones.
    assert cascade.cost == pytest.approx((1_000 * 15 * 0.1 + 500 * 40 * 1.0) / 1e6)


def test_times_are_medians_over_rounds() -> None:
    cascade = tradeoffs(played(), "large", PRICES)[2]
    assert cascade.latency.mean == cascade.latency.p50 == cascade.latency.p95 == pytest.approx(300)
    assert cascade.ttft.p50 == pytest.approx(150)


def test_a_question_without_an_answer_is_no_figure() -> None:
    rounds = played()
    rounds["small"] = [[Result("small", "sort", "easy", error="ENGINE_FAILED: row lost")] * 2] * 3
    with pytest.raises(ValueError, match="small: ENGINE_FAILED: row lost"):
        tradeoffs(rounds, "large", PRICES)


def test_a_strong_model_that_is_never_right_compares_with_nothing() -> None:
    wrong = [[result("large", False, leg("large", 5))]]
    with pytest.raises(ValueError, match="large got no answer right"):
        tradeoffs({"large": wrong}, "large", PRICES)


@pytest.fixture
def found() -> list[Tradeoff]:
    return tradeoffs(played(), "large", PRICES)


def test_the_table_has_a_line_for_each(found: list[Tradeoff]) -> None:
    header, rule, *lines = table(found).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| small", "| large", "| cascade-judged"]
    assert len({line.count("|") for line in (header, rule, *lines)}) == 1
    assert "66.7% | 75.0%" in lines[2]


def test_figures_have_the_stable_names(found: list[Tradeoff]) -> None:
    assert tier_runs.HEADLINE == "cascade-judged"
    accuracy, tokens, *_ = tier_runs.figures(found, 5, 1)
    assert (accuracy.figure, accuracy.ours, accuracy.peer) == ("routed_accuracy_share", 1.0, 0.99)
    assert tokens.figure == "large_token_share"
    assert tokens.ours == pytest.approx(2 / 3)
    assert tokens.ratio == pytest.approx(0.6)


def test_the_picture_is_a_png(found: list[Tradeoff], tmp_path: Path) -> None:
    draw(found, 0.99, 0.4, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
