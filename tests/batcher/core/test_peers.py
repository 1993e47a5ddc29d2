import pytest

from batcher.core.peers import EXPIRY_S, Peers, Share
from sluice.internal.v1.control_pb2 import BatcherReport, ModelReport


def report(
    batcher: str, *, workers: int = 1, queued: int = 0, leaving: bool = False
) -> BatcherReport:
    models = [ModelReport(model="m", workers=workers, queued=queued)]
    return BatcherReport(batcher=batcher, models=models, leaving=leaving)


def test_a_batcher_counts_itself_once() -> None:
    peers = Peers("b1")
    peers.take(report("b1", queued=3), 0.0)
    assert peers.share("m", 0.0) == Share(1, 0)


def test_another_one_counts_while_it_is_heard() -> None:
    peers = Peers("b1")
    peers.take(report("b2"), 0.0)
    peers.take(report("b2", queued=1), 1.0)
    assert peers.share("m", EXPIRY_S + 0.9) == Share(2, 1)
    assert peers.share("other", 1.0) == Share(1, 0)
    assert peers.share("m", EXPIRY_S + 1.0) == Share(1, 0)


def test_one_without_a_worker_or_that_leaves_does_not_count() -> None:
    peers = Peers("b1")
    peers.take(report("b2"), 0.0)
    peers.take(report("b2", workers=0), 0.0)
    assert peers.share("m", 0.0) == Share(1, 0)
    peers.take(report("b2"), 0.0)
    peers.take(report("b2", leaving=True), 0.0)
    assert peers.share("m", 0.0) == Share(1, 0)


@pytest.mark.parametrize(
    ("share", "free", "used", "unanswered", "room"),
    [
        (Share(), 8, 0, 0, 8),
        (Share(), 8, 3, 3, 5),
        (Share(2), 8, 0, 0, 4),
        (Share(2), 8, 4, 4, 0),  # the rest of what was free is for the others
        (Share(2), 1, 7, 0, 1),  # nobody else wants it
        (Share(2), 0, 4, 0, 0),
        (Share(3), 8, 0, 0, 3),
        (Share(2, 1), 8, 0, 0, 4),
        (Share(2, 1), 1, 4, 0, 0),  # it is the other one's turn
        (Share(2, 1), 1, 3, 0, 1),
        (Share(2, 1), 4, 7, 0, 0),
    ],
)
def test_room_is_a_part_of_what_is_free(
    share: Share, free: int, used: int, unanswered: int, room: int
) -> None:
    assert share.of(8, free, used, unanswered) == room


@pytest.mark.parametrize("batchers", [1, 2, 3, 5])
@pytest.mark.parametrize("free", range(9))
def test_on_one_word_all_together_use_what_is_free_and_little_more(
    batchers: int, free: int
) -> None:
    share, sent = Share(batchers), [0] * batchers
    for _ in range(3):
        sent = [unanswered + share.of(8, free, unanswered, unanswered) for unanswered in sent]
    assert free <= sum(sent) <= free + batchers - 1
