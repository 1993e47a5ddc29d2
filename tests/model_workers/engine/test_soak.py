from tests.model_workers.engine.soak import soak


def test_a_short_soak_loses_nothing_and_does_not_grow() -> None:
    found = soak(300)
    assert (found.lost_blocks, found.lost_rows) == (0, 0)
    assert not found.leaks, f"{found.growth_mb:+.1f} MB"
    assert found.preemptions > 0
