"""What the batchers' reports say together."""

from gateway.streaming.load_table import EXPIRY_S, ModelLoadTable
from sluice.internal.v1.control_pb2 import BatcherReport, ModelReport


def report(
    batcher: str, *, workers: int = 1, queued: int = 2, leaving: bool = False
) -> BatcherReport:
    models = [ModelReport(model="m", workers=workers, slots=8, running=3, queued=queued)]
    return BatcherReport(batcher=batcher, models=models, leaving=leaving)


def test_a_model_is_ready_while_a_batcher_says_so() -> None:
    loads = ModelLoadTable()
    assert not loads.load("m", 0).ready
    loads.update(report("b1"), 0)
    assert loads.load("m", EXPIRY_S - 0.1).ready
    assert not loads.load("m", EXPIRY_S).ready
    assert not loads.load("other", 0).ready


def test_a_batcher_that_leaves_is_forgotten_at_once() -> None:
    loads = ModelLoadTable()
    loads.update(report("b1"), 0)
    loads.update(report("b1", leaving=True), 0)
    assert not loads.load("m", 0).ready


def test_a_batcher_without_workers_makes_nothing_ready() -> None:
    loads = ModelLoadTable()
    loads.update(report("b1", workers=0), 0)
    assert not loads.load("m", 0).ready


def test_of_two_batchers_the_silent_one_is_left_out() -> None:
    loads = ModelLoadTable()
    loads.update(report("b1", queued=1), 0)
    loads.update(report("b2", queued=5), 2)
    assert loads.load("m", 2).queued == 6
    assert loads.load("m", EXPIRY_S).queued == 5


def test_batchers_share_workers_but_not_queues() -> None:
    loads = ModelLoadTable()
    loads.update(report("b1"), 0)
    loads.update(report("b2", queued=5), 0)
    load = loads.load("m", 1)
    assert (load.slots, load.running, load.queued) == (8, 3, 7)
    loads.expire(EXPIRY_S)
    assert loads.load("m", 1).queued == 0
