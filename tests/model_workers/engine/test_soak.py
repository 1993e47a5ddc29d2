from tests.model_workers.engine.soak import soak


def test_a_short_soak_loses_nothing() -> None:
    found = soak(400)
    assert (found.lost_blocks, found.lost_rows) == (0, 0)
    assert found.preemptions > 0
