"""Whole histories of a queue and its workers; a seed plays one again, see `tests.batcher.core.seeds`."""

import pytest

from tests.batcher.core.scheduler.fuzz import QueueFuzz


@pytest.mark.parametrize(
    "first", [0, 10, *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 80, 10))]
)
def test_every_decision_is_right(first: int) -> None:
    for seed in range(first, first + 10):
        QueueFuzz(seed).run()
