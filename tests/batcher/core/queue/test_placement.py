import math

import pytest

from batcher.core.queue.classes import WaitingClass
from batcher.core.queue.concurrency import Concurrency
from batcher.core.queue.entries import Entry
from batcher.core.queue.lengths import OutputLengths
from batcher.core.queue.placement import Placement
from batcher.core.queue.waiting import Turn
from batcher.core.replicas import Replica
from batcher.core.tasks import QueuedTask
from sluice.settings.batching import Policy


def entry(prompt: int = 100, cache: int = 200, prefix: bytes = b"") -> Entry:
    made = Entry(QueuedTask("r", "bulk", prompt_tokens=prompt, max_tokens=cache, prefix=prefix))
    made.cache = cache
    return made


def placement(policy: Policy | None = None) -> Placement:
    policy = policy or Policy(waiting_tokens_max=1000)
    return Placement(policy, Concurrency(policy))


def turn(spare_rows: int = 0) -> Turn:
    members = WaitingClass(Policy(), "bulk", {}, OutputLengths(0.9))
    return Turn(members, math.inf, False, spare_rows, prefill_s_max=math.inf, is_modest=True)


def chosen(of: Placement, first: Entry, *replicas: Replica, spare_rows: int = 0) -> str | None:
    replica = of.choose(first, replicas, turn(spare_rows))
    return replica.worker if replica else None


def busy(worker: str, **values: float) -> Replica:
    known: dict[str, float] = {"running_rows": 4, "step_s": 0.01, "prefill_token_s": 0.001}
    return Replica(worker, **{"free_rows": 4, **known, **values})  # type: ignore[arg-type]


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
def test_a_worker_without_room_gets_nothing(replica: Replica, room: bool) -> None:
    assert chosen(placement(), entry(), replica) == ("w" if room else None)


def test_a_prompt_longer_than_may_wait_goes_to_a_worker_with_nothing_waiting() -> None:
    assert chosen(placement(), entry(prompt=5000), busy("w")) == "w"
    assert chosen(placement(), entry(prompt=5000), busy("w", waiting_tokens=1)) is None


def test_batches_that_still_run_are_limited_where_the_policy_says_so() -> None:
    policy = Policy(batches_running_max=1)
    concurrency = Concurrency(policy)
    batch = concurrency.open("w", 0.0)
    batch.rows = 2
    limited = Placement(policy, concurrency)
    concurrency.row_ended(batch, 1.0)
    assert chosen(limited, entry(), busy("w")) is None
    concurrency.row_ended(batch, 1.0)
    assert chosen(limited, entry(), busy("w")) == "w"


def test_the_worker_whose_first_token_comes_soonest_is_taken() -> None:
    behind = busy("behind", waiting_tokens=500)
    slow = busy("slow", step_s=0.9)
    assert chosen(placement(), entry(), behind, slow, busy("soon")) == "soon"


def test_without_known_costs_the_emptier_one_is_taken() -> None:
    full = Replica("full", 1, running_rows=7)
    empty = Replica("empty", 7, running_rows=1)
    assert chosen(placement(), entry(), full, empty) == "empty"


@pytest.mark.parametrize(("waiting", "worker"), [(90, "knows"), (150, "soon")])
def test_a_worker_that_knows_the_prompt_may_be_slower_by_what_the_prompt_takes(
    waiting: int, worker: str
) -> None:
    placed, first = placement(), entry(prefix=b"x")
    placed.sent(first, "knows")
    knows, soon = busy("knows", waiting_tokens=waiting), busy("soon")
    assert chosen(placed, first, soon, knows) == worker
    assert chosen(placed, entry(prefix=b"y"), soon, knows) == "soon"


def test_rows_are_left_free_but_never_more_than_a_quarter() -> None:
    small = Replica("small", 2, running_rows=1)
    large = Replica("large", 2, running_rows=30)
    assert placement().spared(small, turn(4)) == 0
    assert placement().spared(large, turn(2)) == 2
    assert placement().spared(large, turn(99)) == 8
    assert chosen(placement(), entry(), large, spare_rows=2) is None
    assert chosen(placement(), entry(), large, spare_rows=1) == "large"


def test_a_replica_after_a_batch_has_less_room() -> None:
    assert Replica("w", 3).free_tokens == math.inf
    assert Replica("w", 3).idle
    assert not Replica("w", 3, batches_in_flight=1).idle
