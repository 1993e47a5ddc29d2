"""What is learned from outcomes whose structure is known."""

from dataclasses import replace

import numpy as np
import pytest

from gateway.routing.learned.model import LearnedRouter
from learning import train as training
from learning.outcomes import BadOutcomes, OneSided
from learning.report import curve_of
from tests.learning.made_up import EASY, HARD, outcomes


def test_finds_what_the_small_model_cannot_do(by_prompt: LearnedRouter) -> None:
    hard, easy = (by_prompt.prompts.score(f"{text} near the lake?") for text in (HARD, EASY))
    assert hard.gain > 0.5 > 0.3 > easy.gain
    assert hard.p_weak < 0.4 < 0.6 < easy.p_weak
    assert hard.p_strong > 0.7
    assert by_prompt.cascade is None, "there were no answers"
    # Figures are those of rows not seen.
    curve = curve_of(by_prompt.prompts.calibration)
    assert curve.apgr() > 0.65
    assert curve.cpt(50) < 40


def test_finds_sums_that_do_not_add_up(by_answer: LearnedRouter) -> None:
    prompt = "How many are 5 and 7 by the lake?"
    assert by_answer.cascade is not None
    wrong = by_answer.cascade.score(prompt, "There are 5 + 7 = 31 in all.\n#### 12")
    right = by_answer.cascade.score(prompt, "There are 5 + 7 = 12 in all.\n#### 12")
    assert wrong.gain > right.gain + 0.3


def test_chance_teaches_nothing() -> None:
    draw = np.random.default_rng(3)
    rows = [
        replace(row, weak=float(draw.random() < 0.6), strong=float(draw.random() < 0.8))
        for row in outcomes(100)
    ]
    router = training.train(rows)
    gains = [router.prompts.score(row.prompt).gain for row in rows]
    assert np.std(gains) < 0.15
    assert np.mean(gains) == pytest.approx(0.2, abs=0.15)


def test_the_seed_decides() -> None:
    rows = outcomes(30)
    routers = [training.train(rows, seed) for seed in (1, 1, 2)]
    first, again, other = ([one.prompts.score(row.prompt) for row in rows] for one in routers)
    assert first == again != other


def test_rows_count_by_their_weight() -> None:
    """Two tenants who disagree: the one that weighs more is followed."""
    rows = outcomes(60)
    upside_down = [
        replace(row, prompt_id=f"u{row.prompt_id}", weak=1 - row.weak, weight=0.05) for row in rows
    ]
    router = training.train([*rows, *upside_down])
    assert router.prompts.score(HARD).gain > router.prompts.score(EASY).gain + 0.2


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(BadOutcomes, match="29 outcomes, at least 30"):
        training.train(outcomes(29))


def test_a_label_between_counts_for_both_sides() -> None:
    rows = [replace(row, weak=0.3 if row.weak < 0.5 else 0.9) for row in outcomes(80)]
    router = training.train(rows)
    hard, easy = router.prompts.score(HARD), router.prompts.score(EASY)
    assert hard.gain > easy.gain + 0.2
    assert 0 < hard.p_weak < easy.p_weak <= 1


def test_rows_with_one_side_teach_and_do_not_calibrate() -> None:
    """Few rows with both sides do not tell easy from hard; many with one side do."""
    few = outcomes(30, seed=1)
    more = [
        OneSided(row.prompt, row.weak, None) if at % 2 else OneSided(row.prompt, None, row.strong)
        for at, row in enumerate(outcomes(150, seed=2))
    ]
    without, taught = training.train(few), training.train(few, 0, more)
    assert taught.prompts.calibration.weak.tolist() == without.prompts.calibration.weak.tolist()
    assert taught.prompts.score(HARD).gain > taught.prompts.score(EASY).gain + 0.2


def test_filled_rows_weigh_at_most_twice_the_others(by_prompt: LearnedRouter) -> None:
    rows = outcomes(30)
    filled = training.fill_missing(by_prompt, rows, [OneSided(HARD, None, 1.0)] * 500)
    assert sum(row.weight for row in filled) == pytest.approx(60)
    assert filled[0].strong == 1.0
    assert filled[0].weak == by_prompt.prompts.score(HARD).p_weak
