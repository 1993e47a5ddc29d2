import gc

from sluice import heap


def test_what_is_there_is_not_collected_again() -> None:
    kept = [[number] for number in range(1000)]
    before = gc.get_freeze_count()
    try:
        heap.freeze()
        assert gc.get_freeze_count() > before + len(kept)
    finally:
        gc.unfreeze()
