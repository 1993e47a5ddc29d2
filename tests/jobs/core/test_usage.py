"""How busy workers were, out of counters."""

import pytest

from jobs.core.usage import Reading, UseMeter, shares
from sluice.internal.v1.job_pb2 import MeshUse


def one(value: float, whose: str = "a") -> list[Reading]:
    return [Reading((whose,), value)]


def test_what_was_done_before_the_first_reading_does_not_count() -> None:
    meter, use = UseMeter(), MeshUse()
    meter.told(use, 100.0, 2, one(50), one(1000, "t"), one(400, "p"))
    assert shares(use) == (None, None)
    meter.told(use, 110.0, 2, one(65), one(1300, "t"), one(500, "p"))
    assert shares(use) == (pytest.approx(15 / 20), pytest.approx(0.25))


def test_a_process_that_was_started_again_is_counted_from_then_on() -> None:
    meter, use = UseMeter(), MeshUse()
    for now, busy, tokens in ((0.0, 50.0, 10.0), (10.0, 3.0, 2.0), (20.0, 8.0, 7.0)):
        meter.told(use, now, 1, one(busy), one(tokens, "t"), [])
    assert (use.busy_s, use.worker_s, use.batch_tokens) == (5.0, 20.0, 5)


def test_a_new_worker_counts_whole_and_none_is_busier_than_its_time() -> None:
    meter, use = UseMeter(), MeshUse()
    meter.told(use, 0.0, 1, [], [], [])
    meter.told(use, 10.0, 1, one(4), [], [])
    assert use.busy_s == 4
    meter.told(use, 11.0, 1, one(9), [], [])
    assert (use.busy_s, shares(use)) == (5, (pytest.approx(5 / 11), None))
