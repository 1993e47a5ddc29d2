"""Whole histories of a queue and its workers; a seed plays the same one again."""

import pytest

from tests.batcher.core.scheduler.fuzz import QueueFuzz


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 220))]
)
def test_every_decision_is_right(seed: int) -> None:
    QueueFuzz(seed).run()
