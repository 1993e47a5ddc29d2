from batcher.core.peers import EXPIRY_S, Peers
from sluice.internal.v1.control_pb2 import BatcherReport, ModelReport


def report(batcher: str, *, workers: int = 1, leaving: bool = False) -> BatcherReport:
    models = [ModelReport(model="m", workers=workers)]
    return BatcherReport(batcher=batcher, models=models, leaving=leaving)


def test_a_batcher_counts_itself_once() -> None:
    peers = Peers("b1")
    assert peers.count("m", 0.0) == 1
    assert not peers.take(report("b1"), 0.0)
    assert peers.count("m", 0.0) == 1


def test_another_one_counts_while_it_is_heard() -> None:
    peers = Peers("b1")
    assert peers.take(report("b2"), 0.0)
    assert not peers.take(report("b2"), 1.0)
    assert peers.count("m", EXPIRY_S + 0.9) == 2
    assert peers.count("other", 1.0) == 1
    assert peers.count("m", EXPIRY_S + 1.0) == 1


def test_one_without_a_worker_or_that_leaves_does_not_count() -> None:
    peers = Peers("b1")
    peers.take(report("b2"), 0.0)
    assert peers.take(report("b2", workers=0), 0.0)
    assert peers.count("m", 0.0) == 1
    peers.take(report("b2"), 0.0)
    assert peers.take(report("b2", leaving=True), 0.0)
    assert peers.count("m", 0.0) == 1
