"""The interpreter's settings of every process."""

import gc
import subprocess
import sys

import pytest

from sluice import interpreter


def test_the_heap_of_the_start_is_not_collected_again() -> None:
    kept = [[number] for number in range(1000)]
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        interpreter.freeze_heap()
        assert gc.get_freeze_count() > before + len(kept)
        assert gc.get_threshold() == interpreter.GC_THRESHOLDS
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("module", ["model_workers.process", "sluice.process", "cli.main"])
def test_collector_stays_on_where_nothing_turns_it_on_again(module: str) -> None:
    code = f"import gc, {module}; assert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], check=True)
