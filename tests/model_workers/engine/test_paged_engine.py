"""The engine over a model that shows every fault of the cache in the tokens (tests/support/hash_model.py)."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine import blocks
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
)
from sluice.errors import InvalidRequest
from sluice.settings.models import PrefixCache
from tests.support.hash_model import (
    NAN_TOKEN,
    OOM_TOKEN,
    VOCABULARY,
    HashModel,
    alone,
    busy,
    greedy,
    hash_engine,
    sequences,
)
from tests.support.lazy_device import LazyModel, LazySampler, Stream
from tests.support.sequences import Answers, drive, sequence_spec


@given(
    sequences(),
    st.integers(16, 40),
    st.integers(1, 5),
    st.integers(1, 30),
    st.sampled_from(get_args(PrefixCache)),
    st.booleans(),
    st.sampled_from((2, 4)),
    st.randoms(use_true_random=False),
)
def test_any_schedule_gives_every_row_the_tokens_it_has_alone(
    specs: Sequence[SequenceSpec],
    num_blocks: int,
    slots: int,
    prefill_tokens: int,
    prefix_cache: PrefixCache,
    overlap: bool,
    share_tokens: int,
    numbers: random.Random,
) -> None:
    model = LazyModel(num_blocks) if overlap else HashModel(num_blocks)
    with patch.object(blocks, "SHARE_TOKENS", share_tokens):
        engine = hash_engine(
            model,
            sampler=LazySampler(model.stream) if isinstance(model, LazyModel) else None,
            slots=slots,
            prefill_tokens=prefill_tokens,
            prefix_cache=prefix_cache,
            overlap=overlap,
        )
    late = {spec.request_id for spec in specs if numbers.random() < 0.1}
    waiting = [
        replace(spec, deadline=numbers.randrange(30)) if spec.request_id in late else spec
        for spec in specs
    ]
    answers, cancelled, steps = Answers(), set(), 0
    while waiting or busy(engine):
        while waiting and numbers.random() < 0.4:
            engine.add(waiting.pop(), float(steps))
        if numbers.random() < 0.05:
            cancelled.add(numbers.choice(specs).request_id)
            engine.cancel(cancelled)
        answers.take(engine.step(float(steps)))
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    assert model.largest_prefill <= prefill_tokens
    assert engine.load().free_blocks == num_blocks, "no block is lost"
    for spec in specs:
        name, expected = spec.request_id, alone(spec)
        tokens = answers.tokens[name]
        if answers.ends[name] in (SequenceEnd.CANCELLED, SequenceEnd.DEADLINE):
            assert name in (cancelled if answers.ends[name] is SequenceEnd.CANCELLED else late)
            assert tokens == expected.tokens[name][: len(tokens)]
        else:
            assert (tokens, answers.ends[name]) == (expected.tokens[name], expected.ends[name])


def lazy_engine(**limits: Any) -> tuple[PagedEngine, Stream]:
    """An engine that begins steps before their results are there."""
    model = LazyModel()
    sampler = LazySampler(model.stream)
    return hash_engine(model, sampler=sampler, overlap=True, **limits), model.stream


def test_a_step_is_begun_before_the_one_before_is_read() -> None:
    engine, stream = lazy_engine()
    prompt = [5, 6, 7, 8, 9]
    assert drive(engine, sequence_spec("r", prompt, Sampling(4))).tokens["r"] == greedy(prompt, 4)
    # The last step is not begun: the sequence has no room for what it would draw.
    assert stream.events == ["begin", *["begin", "read"] * 3, "read"]


def test_a_row_that_stops_is_computed_once_in_vain() -> None:
    engine, stream = lazy_engine()
    prompt = [5, 6, 7, 8, 9]
    expected = greedy(prompt, 9)
    stop = next(token for token in expected[2:] if token not in expected[:2])
    sampling = Sampling(9, stop_token_ids=frozenset({stop}))
    answers = drive(engine, sequence_spec("r", prompt, sampling))
    assert answers.tokens["r"] == expected[: expected.index(stop) + 1]
    assert answers.ends["r"] is SequenceEnd.STOP
    assert stream.events.count("begin") == len(answers.tokens["r"]) + 1
    assert not busy(engine)


def test_draws_that_read_tokens_are_not_overlapped() -> None:
    engine, stream = lazy_engine()
    sequence = sequence_spec("r", [5, 6, 7], Sampling(4, repetition_penalty=1.3))
    assert drive(engine, sequence).tokens["r"] == alone(sequence).tokens["r"]
    assert stream.events == ["begin", "read"] * 4


def test_cancelled_and_late_sequences_end_with_read_tokens() -> None:
    engine, _ = lazy_engine()
    engine.add(sequence_spec("cancelled", [5, 6, 7], Sampling(9)), 0.0)
    engine.add(sequence_spec("late", [6, 7, 8], Sampling(9), deadline=5.0), 0.0)
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step(0.0))
    engine.cancel(["cancelled"])
    ends = engine.step(6.0)
    assert {end.request_id: (end.start_index, end.end) for end in ends} == {
        "cancelled": (2, SequenceEnd.CANCELLED),
        "late": (2, SequenceEnd.DEADLINE),
    }
    assert answers.tokens == {"cancelled": greedy([5, 6, 7], 2), "late": greedy([6, 7, 8], 2)}
    assert not busy(engine)
    # Nothing of the step that was under way is taken for another sequence's.
    again = drive(engine, sequence_spec("late", [1, 2], Sampling(5), attempt=1), now=7.0)
    assert again.tokens["late"] == greedy([1, 2], 5)


def test_an_engine_that_is_emptied_forgets_the_step_under_way() -> None:
    engine, _ = lazy_engine()
    engine.add(sequence_spec("r", [5, 6, 7], Sampling(9)), 0.0)
    engine.step(0.0)
    assert [(step.start_index, step.end) for step in engine.abort("it broke")] == [
        (0, SequenceEnd.RETURNED)
    ]
    assert drive(engine, sequence_spec("r", [1, 2], Sampling(5))).tokens["r"] == greedy([1, 2], 5)


def test_a_row_without_numbers_fails_a_step_later_and_alone() -> None:
    engine = hash_engine(overlap=True)
    answers = drive(
        engine,
        sequence_spec("bad", [5, NAN_TOKEN], Sampling(9)),
        sequence_spec("good", [6, 7, 8], Sampling(9)),
    )
    assert answers.ends == {"bad": SequenceEnd.FAILED, "good": SequenceEnd.LENGTH}
    assert (answers.tokens["bad"], answers.tokens["good"]) == ([], greedy([6, 7, 8], 9))
    assert not busy(engine)


@given(sequences(), st.randoms(use_true_random=False))
def test_resumed_rows_go_on_as_if_nothing_had_happened(
    specs: Sequence[SequenceSpec], numbers: random.Random
) -> None:
    engine = hash_engine(HashModel(24))
    whole = {spec.request_id: alone(spec) for spec in specs}
    for spec in specs:
        tokens = whole[spec.request_id].tokens[spec.request_id]
        kept = tokens[: numbers.randrange(len(tokens) + 1)]
        engine.add(sequence_spec(spec.request_id, spec.prompt, spec.sampling, produced=kept), 0.0)
    answers = Answers()
    for spec in specs:
        answers.tokens[spec.request_id] = []
    first: dict[str, int] = {}
    steps = []
    while engine.has_sequences():
        steps += engine.step(0.0)
    for step in steps:
        first.setdefault(step.request_id, step.start_index)
        answers.tokens[step.request_id] += step.token_ids
    for name, expected in whole.items():
        assert answers.tokens[name] == expected.tokens[name][first[name] :]


def test_a_prefix_of_another_tenant_is_computed_again() -> None:
    model = HashModel()
    engine = hash_engine(model)
    prompt = list(range(20))
    asked = replace(sequence_spec("acme", prompt, Sampling(1)), tenant="acme")
    drive(engine, asked)
    other = drive(engine, replace(asked, request_id="other", tenant="other"))
    assert (model.computed_tokens, other.cached["other"]) == (40, 0)
    again = drive(engine, replace(asked, request_id="again"))
    assert (model.computed_tokens, again.cached["again"]) == (41, 19)


def test_cached_prompt_costs_one_token_and_a_copied_block() -> None:
    model = HashModel()
    engine = hash_engine(model)
    prompt = list(range(20))
    first = drive(engine, sequence_spec("first", prompt, Sampling(6)))
    before = model.computed_tokens
    again = drive(engine, sequence_spec("again", prompt, Sampling(6)))
    assert model.computed_tokens - before == 1 + 5
    assert again.tokens["again"] == first.tokens["first"]
    assert again.cached["again"] == 19


def test_concurrent_sequences_compute_a_shared_prefix_once() -> None:
    model = HashModel()
    engine = hash_engine(model, slots=8, prefill_tokens=100)
    prompts = [[*range(20), 40 + i] for i in range(8)]
    answers = drive(
        engine, *(sequence_spec(f"r{i}", p, Sampling(1)) for i, p in enumerate(prompts))
    )
    assert model.computed_tokens == 20 + 8
    assert answers.tokens == {f"r{i}": greedy(p, 1) for i, p in enumerate(prompts)}


def test_broken_numbers_fail_one_sequence_and_leave_no_trace() -> None:
    model = HashModel(24)
    engine = hash_engine(model, slots=3)
    bad = [1, 2, 3, 4, NAN_TOKEN, *range(10)]
    answers = drive(
        engine,
        sequence_spec("good", [1, 2, 3, 4, 5], Sampling(9)),
        sequence_spec("bad", bad, Sampling(9)),
        sequence_spec("late", [1, 2, 3, 4, 6], Sampling(9)),
    )
    assert answers.ends == {
        "good": SequenceEnd.LENGTH,
        "bad": SequenceEnd.FAILED,
        "late": SequenceEnd.LENGTH,
    }
    assert answers.tokens["good"] == greedy([1, 2, 3, 4, 5], 9)
    assert answers.tokens["late"] == greedy([1, 2, 3, 4, 6], 9)
    assert b"nan" not in model.cells.values()
    assert not busy(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("beside", [0, 1, 2, 5])
def test_a_row_that_exhausts_the_memory_is_returned_alone(beside: int, overlap: bool) -> None:
    engine = hash_engine(slots=8, prefill_tokens=100, overlap=overlap)
    sequences = [sequence_spec(f"r{i}", [i, 1], Sampling(9)) for i in range(beside)]
    for sequence in sequences:
        engine.add(sequence, 0.0)
    engine.add(sequence_spec("bad", [1, OOM_TOKEN, 3], Sampling(9)), 0.0)
    steps = engine.step(0.0)
    if overlap:
        assert not steps
        steps = engine.step(0.0)
    (failed,) = [step for step in steps if step.end is SequenceEnd.RETURNED]
    assert (failed.request_id, "memory" in failed.error) == ("bad", True)
    answers = Answers()
    answers.take(steps)
    while busy(engine):
        answers.take(engine.step(0.0))
    assert {sequence.request_id: answers.tokens[sequence.request_id] for sequence in sequences} == {
        sequence.request_id: greedy(sequence.prompt, 9) for sequence in sequences
    }


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    for sequence in (
        sequence_spec("r", [VOCABULARY]),
        sequence_spec("r", [1], produced=[VOCABULARY]),
    ):
        with pytest.raises(InvalidRequest, match=str(VOCABULARY)):
            hash_engine().add(sequence, 0.0)


def test_abort_empties_the_engine_and_it_goes_on() -> None:
    model = HashModel()
    engine = hash_engine(model, slots=1)
    for name in ("a", "b"):
        engine.add(sequence_spec(name, [1, 2]), 0.0)
    engine.step(0.0)
    model.cells[0, 0] = b"nan"
    assert {step.end for step in engine.abort("it broke")} == {SequenceEnd.RETURNED}
    assert not busy(engine)
    assert not model.cells, "what it held is zeroed"
    assert drive(engine, sequence_spec("c", [1, 2])).tokens["c"] == greedy([1, 2], 8)
