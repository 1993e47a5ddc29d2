import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_workers.engine.protocol import RowEnd, RowInvalid, RowSpec, Sampling
from model_workers.engine.transformers_engine import BROKEN, TransformersEngine
from tests.support.rows import Answers, drive, row_spec
from tests.support.tiny_models import CONTEXT, FAMILIES, VOCABULARY, tiny_model

MODELS = {family: tiny_model(family) for family in FAMILIES}


def engine(model: Any = MODELS["llama"], slots: int = 4, prefill: int = 32) -> TransformersEngine:
    return TransformersEngine(
        model, slots=slots, max_waiting=64, context_tokens=CONTEXT, prefill_tokens=prefill
    )


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Lengths on both sides of the prefill bound."""
    numbers = random.Random(seed)
    lengths = [numbers.choice((1, 2, 5, 9, 17, 31, 32, 33, 70, 100)) for _ in range(count)]
    return [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What transformers' own loop answers."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate_while_rows_join_and_leave(family: str) -> None:
    model = MODELS[family]
    core = engine(model)
    asked = {f"r{i}": (prompt, 5 + 3 * i) for i, prompt in enumerate(prompts(10))}
    rows = [row_spec(name, prompt, Sampling(n)) for name, (prompt, n) in asked.items()]
    answers = Answers()
    while rows or core.load().running + core.load().waiting:
        for row in rows[:2]:
            core.add(row, 0.0)
        del rows[:2]
        answers.take(core.step(0.0))
    expected = {name: generated(model, prompt, n) for name, (prompt, n) in asked.items()}
    assert answers.tokens == expected
    assert set(answers.ends.values()) == {RowEnd.LENGTH}
    assert core.cache_bytes() == 0


SAMPLINGS = (
    Sampling(24),
    Sampling(24, temperature=1.0, seed=7),
    Sampling(24, temperature=0.8, top_k=20, top_p=0.9, seed=8, repetition_penalty=1.3),
)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(SAMPLINGS), st.integers(0, 23), st.integers(0, 3), st.integers(0, 9))
def test_a_resumed_row_answers_as_if_nothing_had_happened(
    sampling: Sampling, cut: int, neighbours: int, seed: int
) -> None:
    prompt, *others = prompts(4, seed)
    whole = drive(engine(), row_spec("r", prompt, sampling)).tokens["r"]
    again = row_spec("r", prompt, sampling, produced=whole[:cut], attempt=1)
    beside = [row_spec(f"n{i}", other) for i, other in enumerate(others[:neighbours])]
    rest = drive(engine(), *beside, again).tokens["r"]
    assert whole[:cut] + rest == whole


def test_prefill_is_bounded_and_does_not_stop_rows_that_decode() -> None:
    core = engine(prefill=16)
    core.add(row_spec("short", [1, 2], Sampling(50)), 0.0)
    core.step(0.0)
    core.add(row_spec("long", range(60), Sampling(4)), 0.0)
    tokens = [[step.request_id for step in core.step(0.0)] for _ in range(4)]
    assert tokens == [["short"], ["short"], ["short"], ["short", "long"]]


def test_joining_rows_share_a_pass_up_to_the_bound() -> None:
    core = engine(slots=8, prefill=32)
    for i in range(5):
        core.add(row_spec(f"r{i}", [i] * 10), 0.0)
    assert [len(core.step(0.0)) for _ in range(2)] == [3, 5]


def test_a_cancelled_prompt_in_pieces_leaves_no_trace() -> None:
    core, model = engine(prefill=16), MODELS["llama"]
    core.add(row_spec("first", [3, 4], Sampling(30)), 0.0)
    core.add(row_spec("long", range(60)), 0.0)
    answers = Answers()
    for _ in range(2):
        answers.take(core.step(0.0))
    core.cancel(["long"])
    answers.take(core.step(0.0))
    assert answers.ends == {"long": RowEnd.CANCELLED}
    after = drive(core, row_spec("next", [9, 8, 7], Sampling(30)))
    assert after.tokens["next"] == generated(model, [9, 8, 7], 30)
    assert answers.tokens["first"] + after.tokens["first"] == generated(model, [3, 4], 30)


def test_a_row_that_leaves_moves_the_prompt_in_pieces_behind_it() -> None:
    core, model = engine(prefill=16), MODELS["llama"]
    core.add(row_spec("a", [3, 4], Sampling(2)), 0.0)
    core.add(row_spec("b", [5, 6], Sampling(20)), 0.0)
    core.step(0.0)
    long = list(range(60))
    answers = drive(core, row_spec("long", long, Sampling(20)))
    assert answers.tokens["long"] == generated(model, long, 20)
    assert answers.tokens["b"] == generated(model, [5, 6], 20)[1:]


def test_a_higher_attempt_takes_over_without_a_word_of_the_old_one() -> None:
    core = engine()
    core.add(row_spec("r", [1, 2], Sampling(9)), 0.0)
    first = core.step(0.0)[0].token_ids
    core.add(row_spec("r", [1, 2], Sampling(9), produced=first, attempt=1), 0.0)
    steps = [step for _ in range(8) for step in core.step(0.0)]
    assert {step.attempt for step in steps} == {1}
    assert [*first, *(t for s in steps for t in s.token_ids)] == generated(
        MODELS["llama"], [1, 2], 9
    )


def test_a_broken_row_fails_alone_and_its_slot_is_clean_afterwards() -> None:
    model = tiny_model(seed=4)
    model.model.embed_tokens.weight.data[13] = math.nan
    core = engine(model)
    rows = [
        row_spec("good", [1, 2, 3], Sampling(6)),
        row_spec("bad", [4, 13] + [5] * 20, Sampling(6)),
        row_spec("late", [6], Sampling(6)),
    ]
    answers = drive(core, *rows, row_spec("next", [7, 8], Sampling(6)))
    assert answers.ends == {
        "good": RowEnd.LENGTH,
        "bad": RowEnd.FAILED,
        "late": RowEnd.LENGTH,
        "next": RowEnd.LENGTH,
    }
    alone = {row.request_id: drive(engine(model), row) for row in (rows[0], rows[2])}
    assert answers.tokens["good"] == alone["good"].tokens["good"]
    assert answers.tokens["late"] == alone["late"].tokens["late"]


def test_the_error_of_a_broken_row_names_it() -> None:
    model = tiny_model(seed=4)
    model.model.embed_tokens.weight.data[13] = math.nan
    core = engine(model)
    core.add(row_spec("bad", [13]), 0.0)
    (step,) = core.step(0.0)
    assert (step.end, step.error, step.token_ids) == (RowEnd.FAILED, BROKEN, ())


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    for row in (row_spec("r", [VOCABULARY]), row_spec("r", [1], produced=[VOCABULARY])):
        with pytest.raises(RowInvalid, match=str(VOCABULARY)):
            engine().add(row, 0.0)


def test_abort_empties_the_engine_and_it_goes_on() -> None:
    core = engine(slots=1)
    rows: list[RowSpec] = [row_spec(name, [1, 2]) for name in ("a", "b")]
    for row in rows:
        core.add(row, 0.0)
    core.step(0.0)
    assert {step.end for step in core.abort("it broke")} == {RowEnd.FAILED}
    assert drive(core, row_spec("c", [1, 2])).tokens["c"] == generated(MODELS["llama"], [1, 2], 8)


def test_logprobs_are_those_of_the_logits() -> None:
    core, model = engine(), MODELS["llama"]
    core.add(row_spec("r", [1, 2, 3], Sampling(1, logprobs=True, top_logprobs=3)), 0.0)
    (step,) = core.step(0.0)
    with torch.inference_mode():
        expected = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)
    best = expected.topk(3)
    assert step.logprobs[0].logprob == pytest.approx(float(best.values[0]), abs=1e-4)
    assert [token for token, _ in step.logprobs[0].top] == best.indices.tolist()
