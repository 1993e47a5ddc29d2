"""Whole histories with faults everywhere; a seed plays one again, see `tests.batcher.core.seeds`."""

from unittest.mock import Mock

import pytest

from tests.batcher.core import seeds
from tests.batcher.core.world import World


@pytest.mark.parametrize(
    "numbers", [range(4), pytest.param(range(4, 30), marks=pytest.mark.long)], ids=["few", "more"]
)
def test_nothing_is_lost_doubled_reordered_or_passed_over(numbers: range) -> None:
    for seed in numbers:
        World(seed).run()


def test_a_seed_plays_the_same_history_again() -> None:
    one, two = World(7), World(7)
    one.run()
    two.run()
    assert (one.now, one.numbers) == (two.now, two.numbers)


def test_a_seed_that_fails_is_told_with_the_command_that_plays_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_three(seed: int) -> Mock:
        assert seed != 3
        return Mock(spec=World)

    monkeypatch.setitem(seeds.KINDS, "world", fail_three)
    monkeypatch.setattr("sys.argv", ["seeds", "--kind", "world", "--seeds", "5"])
    assert seeds.main() == 1
    told = capsys.readouterr()
    assert "--kind world --seed 3" in told.out
    assert "world 3: Traceback" in told.err
