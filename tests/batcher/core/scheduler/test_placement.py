import math

import pytest

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.estimates import OutputLengths
from batcher.core.scheduler.order import ClassQuota, WaitingClass
from batcher.core.scheduler.placement import OpenBatches, Placement
from batcher.core.scheduler.task import QueuedTask
from sluice.settings.batching import Policy


def task(prompt: int = 100, cache: int = 200, prefix: bytes = b"") -> QueuedTask:
    made = QueuedTask("r", "bulk", prompt_tokens=prompt, max_tokens=cache, prefix=prefix)
    made.cache_tokens = cache
    return made


def placement(policy: Policy | None = None) -> Placement:
    policy = policy or Policy(waiting_tokens_max=1000)
    return Placement(policy, OpenBatches(policy))


def quota(spare_rows: int = 0) -> ClassQuota:
    members = WaitingClass(Policy(), "bulk", {}, OutputLengths(0.9))
    return ClassQuota(members, math.inf, False, spare_rows, is_modest=True)


def chosen(
    of: Placement, first: QueuedTask, *replicas: Capacity, spare_rows: int = 0
) -> str | None:
    replica = of.choose(first, replicas, quota(spare_rows))
    return replica.worker if replica else None


def busy(worker: str, **values: float) -> Capacity:
    known: dict[str, float] = {"running_rows": 4, "step_s": 0.01, "prefill_token_s": 0.001}
    return Capacity(worker, **{"free_rows": 4, **known, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replica", "room"),
    [
        (busy("w"), True),
        (busy("w", free_rows=0), False),
        (busy("w", free_tokens=199), False),
        (busy("w", free_tokens=200), True),
        (busy("w", waiting_tokens=900), True),
        (busy("w", waiting_tokens=901), False),
        (busy("w", batches_in_flight=4), False),
        (busy("w", running_rows=0, free_tokens=5), True),  # Idle: it says itself what does not fit.
    ],
)
def test_a_worker_without_room_gets_nothing(replica: Capacity, room: bool) -> None:
    assert chosen(placement(), task(), replica) == ("w" if room else None)


def test_a_prompt_longer_than_may_wait_goes_to_a_worker_with_nothing_waiting() -> None:
    assert chosen(placement(), task(prompt=5000), busy("w")) == "w"
    assert chosen(placement(), task(prompt=5000), busy("w", waiting_tokens=1)) is None


def test_batches_that_still_run_are_limited_where_the_policy_says_so() -> None:
    policy = Policy(batches_running_max=1)
    open_batches = OpenBatches(policy)
    batch = open_batches.open("w", 0.0)
    batch.rows = 2
    limited = Placement(policy, open_batches)
    open_batches.row_ended(batch, 1.0)
    assert chosen(limited, task(), busy("w")) is None
    open_batches.row_ended(batch, 1.0)
    assert chosen(limited, task(), busy("w")) == "w"


def test_the_worker_whose_first_token_comes_soonest_is_taken() -> None:
    behind = busy("behind", waiting_tokens=500)
    slow = busy("slow", step_s=0.9)
    assert chosen(placement(), task(), behind, slow, busy("soon")) == "soon"


def test_without_known_costs_the_emptier_one_is_taken() -> None:
    full = Capacity("full", 1, running_rows=7)
    empty = Capacity("empty", 7, running_rows=1)
    assert chosen(placement(), task(), full, empty) == "empty"


@pytest.mark.parametrize(("waiting", "worker"), [(90, "knows"), (150, "soon")])
def test_a_worker_that_knows_the_prompt_may_be_slower_by_what_the_prompt_takes(
    waiting: int, worker: str
) -> None:
    placed, first = placement(), task(prefix=b"x")
    placed.sent(first, "knows")
    knows, soon = busy("knows", waiting_tokens=waiting), busy("soon")
    assert chosen(placed, first, soon, knows) == worker
    assert chosen(placed, task(prefix=b"y"), soon, knows) == "soon"


def test_rows_are_left_free_but_never_more_than_a_quarter() -> None:
    small = Capacity("small", 2, running_rows=1)
    large = Capacity("large", 2, running_rows=30)
    assert placement().free_rows(small, quota(4)) == 2
    assert placement().free_rows(large, quota(2)) == 0
    assert placement().free_rows(large, quota(99)) == -6
    assert chosen(placement(), task(), large, spare_rows=2) is None
    assert chosen(placement(), task(), large, spare_rows=1) == "large"


def test_a_replica_after_a_batch_has_less_room() -> None:
    assert Capacity("w", 3).free_tokens == math.inf
    assert Capacity("w", 3).idle
    assert not Capacity("w", 3, batches_in_flight=1).idle
