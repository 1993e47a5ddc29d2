"""Both models of an engine: every token once, time by the cost, limits kept, whoever is told how many steps to take."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.protocol import Sampling, SequenceSpec
from simulator.cost import StepCost
from simulator.engines import (
    ContinuousEngine,
    EngineLimits,
    SimulatedEngine,
    SimulatedGenerateEngine,
)

COST = StepCost(1.0, 0.01, 0.1, 0.001)
LONGEST = 128


def continuous(limits: EngineLimits) -> ContinuousEngine:
    return ContinuousEngine(COST, limits, LONGEST)


def whole(limits: EngineLimits) -> SimulatedGenerateEngine:
    return SimulatedGenerateEngine(COST, limits, LONGEST)


def row(name: str, prompt: int, answer: int, rank: int = 0, batch: str = "") -> SequenceSpec:
    tokens = (sum(name.encode()),) * prompt  # no two share a prefix
    return SequenceSpec(
        name, "", 0, tokens, (), Sampling(max_tokens=answer), rank=rank, batch=batch
    )


class Played:
    """An engine played to its end."""

    def __init__(self, engine: SimulatedEngine, chance: Random | None = None) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.steps = 0
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        while (stretch := engine.stretch(0.0)) is not None:
            steps = stretch.steps if chance is None else chance.randint(1, stretch.steps)
            self.seconds += stretch.seconds(steps)
            progress = engine.advance(steps)
            self.tokens += progress.tokens
            self.steps += steps
            self.first.update((name, self.seconds) for name in progress.first)
            self.ended.update((name, self.seconds) for name in progress.ended)
            assert self.steps < 100_000


specs = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=20
)
limits = st.builds(
    EngineLimits,
    slots=st.integers(1, 6),
    waiting=st.just(100),
    prefill_tokens=st.sampled_from([0, 7, 64]),
    cache_tokens=st.sampled_from([0, 150, 1000]),
)


@pytest.mark.parametrize("kind", [ContinuousEngine, SimulatedGenerateEngine])
@given(specs=specs, limits=limits, seed=st.integers(0, 3))
def test_every_row_gets_its_tokens_once(
    kind: type[ContinuousEngine] | type[SimulatedGenerateEngine],
    specs: list[tuple[int, int, int]],
    limits: EngineLimits,
    seed: int,
) -> None:
    engine = kind(COST, limits, LONGEST)
    rows = [row(str(i), *spec) for i, spec in enumerate(specs)]
    refused = {
        name for begin in range(0, len(rows), 3) for name in engine.admit(rows[begin : begin + 3])
    }
    played = Played(engine, Random(seed) if seed else None)
    taken = [r for r in rows if r.request_id not in refused]
    assert set(played.ended) == set(played.first) == {r.request_id for r in taken}
    assert played.tokens == sum(r.sampling.max_tokens for r in taken)
    assert all(played.first[name] <= played.ended[name] for name in played.ended)
    load = engine.load()
    assert (load.running, load.waiting, load.running_tokens, load.waiting_tokens) == (0, 0, 0, 0)


@given(specs=specs, limits=limits, seed=st.integers(1, 5))
def test_short_stretches_take_the_time_of_long_ones(
    specs: list[tuple[int, int, int]], limits: EngineLimits, seed: int
) -> None:
    engines = [continuous(limits), continuous(limits)]
    for engine in engines:
        engine.admit([row(str(i), *spec) for i, spec in enumerate(specs)])
    whole, cut = Played(engines[0]), Played(engines[1], Random(seed))
    assert cut.seconds == pytest.approx(whole.seconds)
    assert cut.ended == pytest.approx(whole.ended)


@given(specs=specs, slots=st.integers(1, 6), seed=st.integers(0, 5))
def test_the_cache_is_never_overfull(
    specs: list[tuple[int, int, int]], slots: int, seed: int
) -> None:
    engine = continuous(EngineLimits(slots, 100, 16, cache_tokens=150))
    engine.admit([row(str(i), *spec) for i, spec in enumerate(specs)])
    chance = Random(seed)
    while (stretch := engine.stretch(0.0)) is not None:
        engine.advance(chance.randint(1, stretch.steps))
        load = engine.load()
        assert load.running <= slots
        assert load.running_tokens <= 150 or load.running <= 1


def test_time_is_that_of_the_cost() -> None:
    engine = continuous(EngineLimits(slots=2))
    engine.admit([row("a", 10, 3), row("b", 20, 2)])
    played = Played(engine)
    prefill = COST(30, 0, 0)
    assert played.first == {"a": prefill, "b": prefill}
    second = prefill + COST(0, 2, 11 + 21)
    assert played.ended["b"] == pytest.approx(second)
    assert played.ended["a"] == pytest.approx(second + COST(0, 1, 12))


def test_what_is_full_refuses() -> None:
    engine = continuous(EngineLimits(slots=1, waiting=1))
    assert engine.admit([row("a", 1, 1), row("b", 1, 1), row("c", 1, 1)]) == ["c"]
    full = whole(EngineLimits(slots=2, waiting=0))
    assert full.admit([row("a", 1, 1), row("b", 1, 1), row("c", 1, 1)]) == ["c"]
    assert full.admit([row("d", 1, 1)]) == ["d"]


@pytest.mark.parametrize("kind", [ContinuousEngine, SimulatedGenerateEngine])
def test_a_cancelled_row_does_not_end(
    kind: type[ContinuousEngine] | type[SimulatedGenerateEngine],
) -> None:
    engine = kind(COST, EngineLimits(slots=2), LONGEST)
    engine.admit([row("a", 5, 9), row("b", 5, 9)])
    engine.admit([row("c", 5, 9)])
    assert engine.stretch(0.0) is not None
    engine.advance(1)
    for name in ("a", "c", "unknown"):
        engine.cancel(name)
    assert set(Played(engine).ended) == {"b"}


def test_generate_costs_what_its_longest_row_costs() -> None:
    engine = whole(EngineLimits(slots=4))
    engine.admit([row("long", 100, 3), row("short", 10, 1)])
    played = Played(engine)
    prompts = COST(200, 0, 0, 200 * 100 / 2)
    assert played.first["short"] == played.first["long"] == pytest.approx(prompts)
    assert played.ended["short"] == pytest.approx(prompts), "rows are answered one by one"
    assert played.ended["long"] == played.seconds
    assert played.seconds == pytest.approx(prompts + COST(0, 2, 2 * 101) + COST(0, 2, 2 * 102))


def test_generate_grants_nothing_while_a_batch_runs() -> None:
    engine = whole(EngineLimits(slots=4))
    engine.admit([row("a", 100, 3)])
    assert not engine.load().batch_running
    assert engine.stretch(0.0) is not None
    assert engine.load().batch_running
    progress = engine.advance(1)
    assert (progress.cells, progress.filled) == (100, 100)


def test_generate_counts_padding_of_prompts_and_ended_rows() -> None:
    engine = whole(EngineLimits(slots=4))
    engine.admit([row("long", 100, 3), row("short", 40, 1)])
    cells = filled = 0
    while (stretch := engine.stretch(0.0)) is not None:
        progress = engine.advance(stretch.steps)
        cells, filled = cells + progress.cells, filled + progress.filled
    assert (cells, filled) == (2 * 100 + 2 * 2, 140 + 2)


def test_generate_batches_rows_of_like_length() -> None:
    engine = whole(EngineLimits(slots=3))
    for name, prompt in (("first", 100), ("short", 50), ("alike", 85), ("longer", 110)):
        engine.admit([row(name, prompt, 1, batch=name)])
    engine.stretch(0.0)
    assert engine.advance(1).first == ["first", "alike"]


def test_the_step_that_runs_is_found() -> None:
    engine = continuous(EngineLimits(slots=1))
    engine.admit([row("a", 1, 50)])
    engine.advance(1) if engine.stretch(0.0) else None
    stretch = engine.stretch(0.0)
    assert stretch is not None
    for step in range(1, stretch.steps + 1):
        middle = (stretch.seconds(step) + stretch.seconds(step - 1)) / 2
        assert stretch.steps_within(middle) == step
