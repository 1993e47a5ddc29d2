"""A run that nobody reads as a stream: its result, and how it fails."""

import pytest

from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.model_run import ResultCollector, StreamState
from gateway.streaming.registry import Registry
from sluice.errors import DeadlinePassed, EngineFailed, Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame
from sluice.v1.inference_pb2 import FINISH_REASON_STOP
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.runs import confirm, dispatch_to, new_run, take, words
from tests.gateway.streaming.test_registry import ids


class Bench:
    """One run."""

    def __init__(self, stop: str = "") -> None:
        self.ends = 0
        self.dispatch = dispatch_to()
        self.registry = Registry(self.dispatch, ReplayCache(2, 60))
        self.run = new_run("r1", stop=stop, deadline=10)
        self.result = ResultCollector(self.registry, self.run, self._on_end)
        self.dispatch.send(self.run, 0.0)
        self.dispatch.drain(0.0)

    def _on_end(self, _: ResultCollector) -> None:
        self.ends += 1

    def take(self, sent: Frame) -> None:
        sent.request_id = "r1"
        take(self.registry, sent, now=1.0)

    def has_ended(self) -> bool:
        return self.ends == 1 and len(self.registry) == 0 and "r1" not in self.dispatch


def test_result_waits_streams_and_ends_with_all_tokens() -> None:
    bench = Bench()
    assert bench.result.state is StreamState.PUBLISHING
    confirm(bench.registry, bench.run)
    assert (bench.result.state, bench.run.was_accepted) == (StreamState.WAITING, True)
    bench.take(frame(0, ids("ab")))
    assert bench.result.state is StreamState.STREAMING
    bench.take(last(2, ids("c")))
    assert (bench.run.raw_text, bench.result.reason) == ("abc", FINISH_REASON_STOP)
    assert bench.has_ended()
    assert words(bench.dispatch.drain(0.0)) == {}


def test_values_are_in_the_last_frame() -> None:
    bench, sent = Bench(), last(0, [])
    sent.final.values = b"\0\0\x80\x3f"
    bench.take(sent)
    assert bench.run.final is not None
    assert (bench.run.final.values, bench.result.state) == (sent.final.values, StreamState.FINISHED)
    assert bench.has_ended()


@pytest.mark.parametrize("how", [Overloaded, DeadlinePassed, EngineFailed])
def test_error_ends_the_result_once(how: type[SluiceError]) -> None:
    bench, sent = Bench(), frame(0, [])
    if how is Overloaded:
        bench.registry.fail_send("r1", Overloaded("full"))
    elif how is EngineFailed:
        sent.final.end = frame_pb2.TASK_END_FAILED
        bench.take(sent)
    else:
        confirm(bench.registry, bench.run)
        bench.registry.tick(10.0)
        assert words(bench.dispatch.drain(0.0)) == {"cancel": ["r1"]}
    bench.registry.fail_send("r1", EngineFailed("again"))
    bench.result.fail(EngineFailed("again"))
    assert (type(bench.result.error), bench.result.reason) == (how, None)
    assert bench.has_ended()
