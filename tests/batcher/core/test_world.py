"""Whole histories with lost workers, killed batchers, lost and repeated messages; a seed plays one again."""

import pytest

from tests.batcher.core.world import World


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_doubled_or_reordered(seed: int) -> None:
    World(seed).run()
