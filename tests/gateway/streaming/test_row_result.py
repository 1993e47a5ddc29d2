"""A row that nobody reads as a stream: what it gives, and how it fails."""

import pytest

from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.registry import Registry
from gateway.streaming.state import StreamState
from sluice.errors import DeadlinePassed, EngineFailed, Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame
from sluice.v1.inference_pb2 import FINISH_REASON_STOP, FINISH_REASON_STOP_SEQUENCE
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.rows import Asked, dispatch_to, hold, new_row, said, sent_row, take
from tests.gateway.streaming.test_registry import ids


class Bench:
    """One row."""

    def __init__(self, stop: str = "") -> None:
        self.ends = 0
        self.dispatch = dispatch_to(stall_s=3.0)
        self.registry = Registry(self.dispatch, ReplayCache(2, 60))
        spec = Asked()
        self.row = new_row("r1", stop=stop)
        self.result = self.registry.compute(spec, self.row, self._ended)
        self.dispatch.send(sent_row(self.row), 0.0)
        self.dispatch.drain()

    def _ended(self) -> None:
        self.ends += 1

    def take(self, sent: Frame) -> None:
        sent.request_id = "r1"
        take(self.registry, sent, now=1.0)

    def ended(self) -> bool:
        return self.ends == 1 and len(self.registry) == 0 and "r1" not in self.dispatch


def test_it_waits_streams_and_ends_with_all_tokens() -> None:
    bench = Bench()
    assert bench.result.state is StreamState.PUBLISHING
    hold(bench.registry, "r1")
    assert (bench.result.state, bench.row.taken) == (StreamState.WAITING, True)
    bench.take(frame(0, ids("ab")))
    assert bench.result.state is StreamState.STREAMING
    bench.take(last(2, ids("c")))
    assert (bench.row.raw_text, bench.result.reason) == ("abc", FINISH_REASON_STOP)
    assert bench.ended()
    assert said(bench.dispatch.drain()) == {}


def test_values_are_in_the_last_frame() -> None:
    bench, sent = Bench(), last(0, [])
    sent.final.values = b"\0\0\x80\x3f"
    bench.take(sent)
    assert bench.row.final is not None
    assert (bench.row.final.values, bench.result.state) == (sent.final.values, StreamState.FINISHED)
    assert bench.ended()


def test_a_stop_string_ends_it_and_cancels_the_row() -> None:
    bench = Bench(stop="b")
    bench.take(frame(0, ids("abc")))
    assert (bench.row.transcript.text, bench.result.reason) == ("a", FINISH_REASON_STOP_SEQUENCE)
    assert bench.ended()
    assert said(bench.dispatch.drain()) == {"cancel": ["r1"]}


def test_missing_frames_are_asked_for() -> None:
    bench = Bench()
    bench.take(frame(2, ids("c")))
    assert said(bench.dispatch.drain()) == {"ask": ["r1"]}
    assert bench.ends == 0


@pytest.mark.parametrize("error", [Overloaded("full"), EngineFailed("broken")])
def test_an_error_ends_it_once(error: SluiceError) -> None:
    bench = Bench()
    bench.registry.row_failed("r1", error)
    bench.registry.row_failed("r1", EngineFailed("again"))
    bench.result.fail(EngineFailed("again"))
    assert (bench.result.error, bench.result.reason) == (error, None)
    assert bench.ended()


def test_the_end_of_a_row_may_be_an_error() -> None:
    bench, sent = Bench(), frame(0, [])
    sent.final.end = frame_pb2.TASK_END_FAILED
    bench.take(sent)
    assert isinstance(bench.result.error, EngineFailed)
    assert bench.ended()


def test_its_deadline_cancels_it() -> None:
    bench = Bench()
    hold(bench.registry, "r1")
    bench.dispatch.drain()
    bench.registry.tick(10.0)
    assert isinstance(bench.result.error, DeadlinePassed)
    assert bench.ended()
    assert said(bench.dispatch.drain()) == {"cancel": ["r1"]}
