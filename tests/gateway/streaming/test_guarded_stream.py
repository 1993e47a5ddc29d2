"""A stream whose guards have not decided yet: what shows, what batchers hear, how it ends."""

import pytest

from gateway.safety.guards.checks import Check, Checks, Guard
from gateway.safety.guards.families import GuardVerdict, family_of
from gateway.safety.settings import GuardSettings
from gateway.streaming.answer_stream import AnswerStream, Steering
from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.model_run import StreamState
from gateway.streaming.registry import Registry
from sluice.errors import DeadlinePassed
from sluice.v1.inference_pb2 import FINISH_REASON_CONTENT_FILTER, FINISH_REASON_STOP, Started
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.runs import Asked, confirm, dispatch_to, new_run, read, take, words

SAFE, UNSAFE = GuardVerdict(flagged=False), GuardVerdict(True, ("S1",))


class ScriptedGuards:
    """Guards whose verdicts the test gives."""

    def __init__(self, guard: Guard) -> None:
        self.checks = Checks([guard])
        self.due: list[Check] = self.checks.begin()

    def check_answer(self, stream: AnswerStream, has_ended: bool) -> None:
        tokens = len(stream.current.transcript.token_ids)
        self.due += self.checks.produced(tokens, lambda: stream.current.raw_text, has_ended)


class Bench:
    """One stream under one guard."""

    def __init__(self, **keys: object) -> None:
        settings = GuardSettings.model_validate({"model": "m", "template": "llama_guard", **keys})
        self.guards = ScriptedGuards(Guard("g", settings, family_of(settings)))
        self.dispatch = dispatch_to()
        self.registry = Registry(self.dispatch, ReplayCache(2, 60))
        spec = Asked(event=Started(request_id="r1", model="m"))
        first = new_run("r1", deadline=10)
        self.stream = AnswerStream(
            self.registry,
            spec,
            first,
            steering=Steering(checks=self.guards.checks, check_answer=self.guards.check_answer),
        )
        self.dispatch.send(first, 0)
        confirm(self.registry, first)
        self.reader = self.stream.join(0, 4, lambda: None)

    def take(self, text: str, start: int = 0, *, final: bool = False) -> None:
        ids = [ord(letter) for letter in text]
        sent = last(start, ids) if final else frame(start, ids)
        sent.request_id = "r1"
        take(self.registry, sent, now=1.0)

    def decide(self, verdict: GuardVerdict) -> None:
        assert self.guards.checks.decide(self.guards.due.pop(0), verdict) is not None
        self.stream.pass_verdict(2.0)

    def text(self) -> str:
        return "".join(event.delta.text for event in read(self.stream, self.reader))


def test_held_back_text_of_any_length_is_released_whole() -> None:
    bench = Bench()
    bench.take("a" * 50)
    assert bench.text() == ""
    bench.decide(SAFE)
    bench.take("b", 50)
    assert bench.text() == "a" * 50 + "b"  # not the reader's fault, although its limit is 4


def test_ended_run_is_not_queried_while_guards_decide() -> None:
    bench = Bench()
    bench.take("abc", final=True)
    assert bench.stream.state is StreamState.CHECKING
    assert "r1" not in bench.dispatch
    bench.dispatch.drain(0.0)
    bench.registry.tick(5.0)
    assert words(bench.dispatch.drain(0.0)) == {}
    bench.decide(SAFE)
    delta, finished = read(bench.stream, bench.reader)
    assert (delta.delta.text, finished.finished.reason) == ("abc", FINISH_REASON_STOP)
    assert len(bench.registry) == 0


def test_the_deadline_ends_an_answer_without_a_verdict() -> None:
    bench = Bench()
    bench.take("abc", final=True)
    bench.registry.tick(10.0)
    with pytest.raises(DeadlinePassed):
        read(bench.stream, bench.reader)


@pytest.mark.parametrize("final", [False, True])
def test_a_blocked_answer_shows_what_was_taken_and_no_more(final: bool) -> None:
    bench = Bench(checks=["output"], window_tokens=1)
    bench.take("ab")
    assert bench.text() == "ab"
    bench.take("cd", 2, final=final)
    bench.dispatch.drain(0.0)
    bench.stream.block(("guard.g.S1",), 2.0)
    (finished,) = read(bench.stream, bench.reader)
    assert finished.finished.reason == FINISH_REASON_CONTENT_FILTER
    assert finished.finished.usage.completion_tokens == 4
    assert words(bench.dispatch.drain(0.0)) == ({} if final else {"cancel": ["r1"]})
    again = bench.stream.join(0, 4, lambda: None)
    assert read(bench.stream, again)[0].delta.text == "ab"


def test_a_reroute_restarts_the_answer_and_voids_the_first_one() -> None:
    bench = Bench(checks=["input", "output"], action="block", window_tokens=1)
    bench.take("abc", final=True)
    attempt = new_run("r2", "n")
    assert bench.stream.reroute(attempt, "guard.g.S1")
    assert bench.stream.state is StreamState.PUBLISHING
    (prompt, *stale) = bench.guards.due
    assert stale
    assert bench.guards.checks.decide(stale[0], UNSAFE) is None
    bench.guards.checks.decide(prompt, SAFE)
    bench.take("late", 3)  # of the first row: nobody takes it
    notice, *rest = read(bench.stream, bench.reader)
    assert notice.notices[0].model == "n"
    assert rest == []
    sent = frame(0, [ord("z")])
    sent.request_id = "r2"
    bench.dispatch.send(attempt, 3.0)
    take(bench.registry, sent, now=3.0)
    assert bench.text() == "z"


def test_an_ended_answer_cannot_be_rerouted_or_blocked() -> None:
    bench = Bench()
    bench.stream.fail(DeadlinePassed("over"))
    bench.stream.block(("guard.g.S1",), 2.0)
    bench.stream.pass_verdict(2.0)
    assert not bench.stream.reroute(bench.stream.current, "late")
    assert bench.stream.state is StreamState.FAILED
