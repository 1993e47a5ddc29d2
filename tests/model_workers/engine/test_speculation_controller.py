from itertools import pairwise

import pytest

from model_workers.engine.speculation import (
    PAUSE_STEPS,
    REFRESH_STEPS,
    SAMPLES,
    SKIPPED,
    SpeculationController,
)


def run(
    controller: SpeculationController,
    steps: int,
    *,
    tokens: float,
    plain: float,
    drafted: float,
    sequences: int = 4,
) -> list[bool]:
    """Which of the steps draft, when steps take so long and a sequence gets so many tokens in one with drafts."""
    wanted = []
    for _ in range(steps):
        wanted.append(controller.should_draft(sequences))
        if wanted[-1]:
            controller.add_drafted(sequences, round(sequences * tokens), drafted)
        else:
            controller.add_plain(sequences, plain)
    return wanted


def test_it_measures_both_kinds_first() -> None:
    wanted = run(SpeculationController(), 2 * (SKIPPED + SAMPLES), tokens=3, plain=1, drafted=2)
    assert wanted == [False] * (SKIPPED + SAMPLES) + [True] * (SKIPPED + SAMPLES)


def test_where_it_pays_it_goes_on_and_looks_back_now_and_then() -> None:
    controller = SpeculationController()
    run(controller, 100, tokens=3, plain=1, drafted=2)
    wanted = run(controller, 10 * REFRESH_STEPS, tokens=3, plain=1, drafted=2)
    assert wanted.count(False) == 10
    assert controller.gain(4) == pytest.approx(1.5)


def test_unprofitable_drafting_is_retried_ever_less_often() -> None:
    wanted = run(SpeculationController(), 20 * PAUSE_STEPS, tokens=1.5, plain=1, drafted=2)
    tries = [i for i in range(1, len(wanted)) if wanted[i] and not wanted[i - 1]]
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert len(pauses) >= 3
    assert all(1.8 < later / earlier < 2.2 for earlier, later in pairwise(pauses))
    assert sum(wanted) == len(tries) * (SKIPPED + SAMPLES)


def test_drafting_follows_the_share_of_accepted_drafts() -> None:
    controller = SpeculationController()
    run(controller, 200, tokens=3, plain=1, drafted=2)
    assert sum(run(controller, 200, tokens=1, plain=1, drafted=2)) < 60
    assert sum(run(controller, 2000, tokens=3, plain=1, drafted=2)) > 1000


def test_what_pays_at_few_rows_need_not_at_many() -> None:
    controller = SpeculationController()
    for _ in range(50):
        run(controller, 1, tokens=3, plain=1, drafted=2, sequences=2)
        run(controller, 1, tokens=3, plain=1, drafted=4, sequences=32)
    assert (controller.should_draft(2), controller.should_draft(32)) == (True, False)
    assert controller.gain(2) > 1 > controller.gain(32) > 0


def test_catching_up_counts_only_where_drafting_goes_on() -> None:
    controller = SpeculationController()
    run(controller, SKIPPED + SAMPLES, tokens=3, plain=1, drafted=2)
    for _ in range(20):
        controller.add_drafted(4, 4, 50, catching_up=True)
    run(controller, 40, tokens=3, plain=1, drafted=2)
    assert controller.gain(4) == pytest.approx(1.5)
    controller.add_drafted(4, 4, 50, catching_up=True)
    assert controller.gain(4) < 1
