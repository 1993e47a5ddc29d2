"""Drafts change when tokens come, never which."""

import itertools
import random
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.paged_model import SequenceChunk
from model_workers.engine.protocol import Sampling, SequenceEnd, SequenceSpec
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.speculation import SpeculationController, Speculator
from sluice.settings.models import PrefixCache
from tests.support.hash_model import (
    NAN_TOKEN,
    VOCABULARY,
    HashModel,
    alone,
    busy,
    greedy,
    hash_engine,
    sequences,
)
from tests.support.sequences import Answers, drive, sequence_spec


class Always(SpeculationController):
    """Drafts whether it pays or not."""

    def should_draft(self, sequences: int) -> bool:
        return True


def drafting(
    draft: HashModel,
    *,
    model: HashModel | None = None,
    tokens: int = 3,
    catch_up: int = 16,
    controller: SpeculationController | None = None,
    slots: int = 4,
    prefix_cache: PrefixCache = "tenant",
) -> PagedEngine:
    """An engine over ``model`` with drafts of ``draft``."""
    clock = itertools.count()
    speculator = Speculator(
        draft,
        Sampler(),
        vocab_size=VOCABULARY,
        draft_tokens=tokens,
        catch_up_tokens=catch_up,
        clock=lambda: float(next(clock)),
        controller=controller or Always(),
    )
    model = model or HashModel(draft.num_blocks)
    return hash_engine(model, slots=slots, prefix_cache=prefix_cache, speculator=speculator)


@given(
    sequences(),
    st.integers(16, 40),
    st.sampled_from((0, 60, 256)),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from(get_args(PrefixCache)),
    st.randoms(use_true_random=False),
)
def test_drafting_does_not_change_tokens(
    specs: Sequence[SequenceSpec],
    num_blocks: int,
    wrong: int,
    tokens: int,
    catch_up: int,
    prefix_cache: PrefixCache,
    numbers: random.Random,
) -> None:
    draft = HashModel(num_blocks, wrong=wrong)
    engine = drafting(draft, tokens=tokens, catch_up=catch_up, prefix_cache=prefix_cache)
    waiting, answers = list(specs), Answers()
    while waiting or busy(engine):
        while waiting and numbers.random() < 0.4:
            engine.add(waiting.pop(), 0.0)
        answers.take(engine.step(0.0))
    assert engine._speculator is not None
    assert not engine._speculator._broken, "the small model read what it had not written"
    for spec in specs:
        name, expected = spec.request_id, alone(spec)
        assert answers.tokens[name] == expected.tokens[name]
        assert answers.ends[name] is expected.ends[name]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_drafts_of_the_same_model_all_come_true(temperature: float) -> None:
    """That holds the small model's cache and random numbers too: one wrong cell, and drafts fail."""
    engine = drafting(HashModel())
    sampling = Sampling(33, temperature=temperature, seed=3)
    prompts = [[i, *range(10)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add(sequence_spec(f"r{i}", prompt, sampling), 0.0)
    sizes: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
    while engine.has_sequences():
        for step in engine.step(0.0):
            sizes[step.request_id].append(len(step.token_ids))
    # Before that it catches up with the prompts; at last few tokens are missing.
    assert {tuple(found[2:8]) for found in sizes.values()} == {(4,) * 6}, sizes


def test_a_long_prompt_is_caught_up_with_in_pieces() -> None:
    draft = HashModel()
    engine = drafting(draft, catch_up=8)
    drive(engine, sequence_spec("r", range(40), Sampling(20)))
    assert draft.largest_prefill <= 8


def test_a_draft_that_breaks_is_given_up() -> None:
    class Broken(HashModel):
        def forward(self, chunks: Sequence[SequenceChunk]) -> None:  # type: ignore[override]
            raise RuntimeError("broken")

    engine = drafting(Broken())
    assert drive(engine, sequence_spec("r", [1, 2], Sampling(9))).tokens["r"] == greedy([1, 2], 9)


def test_a_row_without_numbers_leaves_nothing_in_either_cache() -> None:
    model, draft = HashModel(), HashModel()
    engine = drafting(draft, model=model)
    answers = drive(
        engine,
        sequence_spec("bad", [1, 2, NAN_TOKEN], Sampling(9)),
        sequence_spec("good", [3, 4], Sampling(9)),
    )
    assert answers.ends == {"bad": SequenceEnd.FAILED, "good": SequenceEnd.LENGTH}
    assert answers.tokens["good"] == greedy([3, 4], 9)
    assert b"nan" not in {*model.cells.values(), *draft.cells.values()}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(0, "a gain of 4.00: it goes on"), (256, "a gain of 1.00: below 1.05, so it pauses")],
)
def test_the_log_says_whether_drafting_pays(
    wrong: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    # By this clock a step takes as long with drafts as without.
    engine = drafting(HashModel(wrong=wrong), controller=SpeculationController())
    with caplog.at_level("INFO"):
        drive(engine, sequence_spec("r", [1, 2], Sampling(60)))
    assert said in caplog.text
