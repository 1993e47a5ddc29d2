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
    for changed in (report("b1", leaving=True), report("b1", workers=0)):
        loads.update(changed, 0)
        assert not loads.load("m", 0).ready


def test_batchers_share_workers_but_not_queues() -> None:
    loads = ModelLoadTable()
    loads.update(report("b1"), 0)
    loads.update(report("b2", queued=5), 2)
    load = loads.load("m", 2)
    assert (load.slots, load.running, load.queued) == (8, 3, 7)
    assert loads.load("m", EXPIRY_S).queued == 5, "the silent one is left out"
    loads.expire(2 + EXPIRY_S)
    assert loads.load("m", 2).queued == 0
