"""Rows of which one side is known: what they are filled with, and that they help or at least do no harm."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from gateway.routing.learned import one_sided, training
from gateway.routing.learned.one_sided import SHARE_MAX, WEIGHT, OneSided, fill
from gateway.routing.learned.outcomes import BadOutcomes, Outcome
from gateway.routing.learned.router import LearnedRouter
from tests.gateway.routing.learned.made_up import EASY, HARD, TOPICS, outcomes


def halves(rows: Sequence[Outcome], seed: int = 1) -> list[OneSided]:
    """What is left of ``rows`` when only one model was asked, the small one in three of four."""
    draw = random.Random(seed)
    return [
        OneSided(f"half{row.prompt_id}", row.prompt, row.weak, None, row.answer)
        if draw.random() < 0.75
        else OneSided(f"half{row.prompt_id}", row.prompt, None, row.strong, row.answer)
        for row in rows
    ]


def error_of(router: LearnedRouter) -> float:
    """Mean distance of the predicted gains from the true ones, 0.8 for hard prompts and 0 for easy ones."""
    texts = [
        (kind, f"{kind} near the {one} {two}?")
        for kind in (HARD, EASY)
        for one in TOPICS[:4]
        for two in TOPICS[4:]
    ]
    errors = [router.score(text).gain - (0.8 if kind == HARD else 0.0) for kind, text in texts]
    return float(np.abs(errors).mean())


def test_they_help_where_rows_with_both_sides_are_few() -> None:
    alone, together = [], []
    for seed in range(4):
        full = outcomes(30, seed=100 + seed)
        rows = halves(outcomes(150, seed=seed), seed)
        alone.append(error_of(training.train(full)))
        together.append(error_of(one_sided.train(full, rows)))
    assert np.mean(together) < np.mean(alone)
    assert max(np.subtract(together, alone)) < 0.1


def test_the_known_side_stays_and_the_other_is_predicted(by_prompt: LearnedRouter) -> None:
    rows = [OneSided("a", HARD, 0.25, None), OneSided("b", EASY, None, 0.5, weight=2.0)]
    hard, easy = fill(by_prompt, outcomes(120), rows)
    assert (hard.weak, hard.strong) == (0.25, by_prompt.score(HARD).p_strong)
    assert (easy.weak, easy.strong) == (by_prompt.score(EASY).p_weak, 0.5)
    assert hard.assumed
    assert easy.weight == pytest.approx(2 * hard.weight) == pytest.approx(2 * WEIGHT)


def test_many_of_them_never_outweigh_the_others(by_prompt: LearnedRouter) -> None:
    rows = [OneSided(f"h{at}", HARD, 1.0, None) for at in range(1000)]
    filled = fill(by_prompt, outcomes(30), rows)
    assert sum(row.weight for row in filled) == pytest.approx(30 * SHARE_MAX)
    assert (
        fill(by_prompt, outcomes(30), [OneSided("z", HARD, 1.0, None, weight=0.0)])[0].weight == 0
    )


def test_figures_are_of_rows_with_both_sides_alone() -> None:
    router = one_sided.train(outcomes(40), halves(outcomes(60, seed=2)))
    assert len(router.prompts.calibration.gains) == 40
    assert set(router.prompts.calibration.strong) == {0.0, 1.0}


def test_without_them_nothing_changes() -> None:
    rows, text = outcomes(40), f"{HARD} near the lake?"
    assert one_sided.train(rows, []).score(text) == training.train(rows).score(text)


def test_they_do_not_make_up_for_rows_with_both_sides() -> None:
    with pytest.raises(BadOutcomes, match="29 outcomes, at least 30"):
        one_sided.train(outcomes(29), halves(outcomes(100)))
