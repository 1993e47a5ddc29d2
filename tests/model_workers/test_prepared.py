"""Sequences whose constraints are compiled beside the engine's thread: others go on, and every end of a sequence is
reported.
"""

from threading import Event, Semaphore
from typing import Any

import pytest

from model_workers.engine.cacheless import EchoEngine
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
    SequenceStep,
)
from model_workers.prepared import PreparedEngine
from sluice.errors import InvalidRequest, Overloaded

BOUND_S = 20.0


class SlowSampler:
    """Its matchers are made when the test says so."""

    def __init__(self) -> None:
        self.prepared: dict[str, Any] = {}
        self.may_end = Event()
        self.compiled = Semaphore(0)
        self.opened: dict[str, Any] = {}

    def matcher(self, sequence: SequenceSpec) -> str:
        assert self.may_end.wait(BOUND_S)
        if sequence.sampling.regex == "wrong":
            raise InvalidRequest("the constraint cannot be held: wrong")
        return f"matcher of {sequence.request_id}"


class Taking(EchoEngine):
    """Takes the prepared matcher of a sequence, as an engine's sampler does."""

    def __init__(self, sampler: SlowSampler) -> None:
        super().__init__(2, 1, 100)
        self.sampler = sampler

    def add(self, sequence: SequenceSpec, now: float) -> None:
        super().add(sequence, now)
        self.sampler.opened[sequence.request_id] = self.sampler.prepared.pop(
            sequence.request_id, None
        )


@pytest.fixture
def sampler() -> SlowSampler:
    return SlowSampler()


def engine_of(sampler: SlowSampler, **bounds: int) -> PreparedEngine:
    wake = sampler.compiled.release
    return PreparedEngine(Taking(sampler), sampler, wake, **bounds)  # type: ignore[arg-type]


@pytest.fixture
def engine(sampler: SlowSampler) -> PreparedEngine:
    return engine_of(sampler)


def sequence(name: str, regex: str | None = None, attempt: int = 0, **fields: Any) -> SequenceSpec:
    sampling = Sampling(max_tokens=2, regex=regex)
    return SequenceSpec(name, "batcher", attempt, (1, 2), (), sampling, **fields)


def compile_all(sampler: SlowSampler, count: int = 1) -> None:
    """Lets the compilers go on, and waits until so many have woken the engine's thread."""
    sampler.may_end.set()
    assert all(sampler.compiled.acquire(timeout=BOUND_S) for _ in range(count))


def ends(engine: PreparedEngine, now: float = 0.0) -> dict[str, SequenceStep]:
    found = dict[str, SequenceStep]()
    while engine.has_sequences():
        found |= {step.request_id: step for step in engine.step(now) if step.end is not None}
    return found


def test_other_rows_go_on_while_a_constraint_is_compiled(
    engine: PreparedEngine, sampler: SlowSampler
) -> None:
    engine.add(sequence("slow", "a+"), 0.0)
    assert not engine.has_sequences()
    assert engine.load().waiting == 1
    engine.add(sequence("plain"), 0.0)
    assert set(ends(engine)) == {"plain"}
    compile_all(sampler)
    assert engine.has_sequences()
    assert ends(engine)["slow"].end is not None
    assert sampler.opened == {"plain": None, "slow": "matcher of slow"}
    assert not sampler.prepared
    assert engine.load().waiting == 0


def test_what_is_wrong_with_a_constraint_ends_its_row(
    engine: PreparedEngine, sampler: SlowSampler
) -> None:
    engine.add(sequence("bad", "wrong"), 0.0)
    compile_all(sampler)
    end = ends(engine)["bad"]
    assert (end.end, end.reason) == (SequenceEnd.FAILED, "REQUEST_INVALID")
    assert end.error == "the constraint cannot be held: wrong"


def test_rows_that_end_before_they_begin(engine: PreparedEngine, sampler: SlowSampler) -> None:
    engine.add(sequence("gone", "a"), 0.0)
    engine.add(sequence("late", "a", deadline=1.0), 0.0)
    engine.cancel(["gone", "unknown"])
    assert {name: step.end for name, step in ends(engine, 2.0).items()} == {
        "gone": SequenceEnd.CANCELLED
    }
    compile_all(sampler, 2)
    assert ends(engine, 2.0)["late"].end is SequenceEnd.DEADLINE
    assert not sampler.opened


def test_a_row_that_finds_no_place_is_returned(
    engine: PreparedEngine, sampler: SlowSampler
) -> None:
    engine.add(sequence("late", "a"), 0.0)
    for name in ("one", "two", "three"):
        engine.add(sequence(name), 0.0)
    compile_all(sampler)
    end = next(step for step in engine.step(0.0) if step.request_id == "late")
    assert (end.end, end.reason) == (SequenceEnd.RETURNED, "OVERLOADED")


def test_attempts_and_places(
    sampler: SlowSampler,
) -> None:
    engine = engine_of(sampler, compiling_max=1)
    engine.add(sequence("a", "a", attempt=1), 0.0)
    with pytest.raises(InvalidRequest):
        engine.add(sequence("a", "a", attempt=1), 0.0)
    with pytest.raises(Overloaded):
        engine.add(sequence("b", "a"), 0.0)
    engine.add(sequence("a", "a", attempt=2), 0.0)
    compile_all(sampler, 2)
    assert ends(engine)["a"].attempt == 2


def test_a_fault_returns_them_all(engine: PreparedEngine, sampler: SlowSampler) -> None:
    engine.add(sequence("a", "a"), 0.0)
    engine.add(sequence("b"), 0.0)
    assert {step.request_id for step in engine.abort("a fault")} == {"a", "b"}
    sampler.may_end.set()
    assert not engine.has_sequences()
