import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_workers.engine.sampling import distribution
from model_workers.engine.sampling.distribution import uniform
from model_workers.engine.sampling.sampler import (
    NO_DISTRIBUTION,
    DrawRequest,
    DrawResult,
    Sampler,
)
from model_workers.engine.sampling.state import SamplingState
from sluice.errors import InvalidRequest
from tests.model_workers.engine.sampling.sequences import (
    SIZE,
    ListGrammars,
    draw,
    logits,
    opened,
    spec,
    tokens,
)

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=SIZE, max_size=SIZE)


@given(LOGITS, st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_the_token_is_where_the_distribution_passes_the_number(
    sequence: list[float], seed: int, index: int
) -> None:
    (token,) = tokens(logits(sequence), opened(produced=[0] * index, temperature=1.0, seed=seed))
    shares = [math.exp(value - max(sequence)) for value in sequence]
    target = uniform(seed, index) * sum(shares)
    below = math.fsum(shares[:token])
    assert below - 1e-4 <= target <= below + shares[token] + 1e-4


@given(
    sequence=LOGITS,
    temperature=st.floats(0.125, 2, width=16),
    top_k=st.integers(0, SIZE),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    penalty=st.sampled_from([0.5, 1.0, 1.7]),
    seen=st.sets(st.integers(0, SIZE - 1)),
)
def test_cuts_keep_the_tokens_that_transformers_keeps(
    sequence: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    seen: set[int],
) -> None:
    # Ties at the border of a cut are broken differently there.
    scores = logits(sequence) + torch.arange(SIZE) * 1e-3
    processors: Any = LogitsProcessorList()
    if seen:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    expected = processors(torch.tensor([sorted(seen)]), scores.clone()).softmax(-1)
    state = opened(
        sorted(seen),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
    )
    (position,) = state.positions(())
    tempered = distribution._tempered(distribution._ruled(scores.clone(), [position]), [position])
    found = distribution.cut(tempered, [position.sampling]).softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_tokens_of_the_same_score_stay_or_go_together() -> None:
    state = opened(temperature=1.0, top_k=2)
    found = {tokens(logits([1, 1, 1, 0]), state)[0] for _ in range(200)}
    assert found == {0, 1, 2}


@given(
    sequence=LOGITS,
    produced=st.lists(st.integers(0, SIZE - 1), max_size=40),
    presence=st.sampled_from([-2.0, 0.0, 0.5]),
    frequency=st.sampled_from([-0.25, 0.0, 1.5]),
)
def test_presence_and_frequency_count_the_answer(
    sequence: list[float], produced: list[int], presence: float, frequency: float
) -> None:
    counts = Counter(produced)
    expected = [
        value - presence * (counts[t] > 0) - frequency * counts[t]
        for t, value in enumerate(sequence)
    ]
    state = opened([3, 4], produced, presence_penalty=presence, frequency_penalty=frequency)
    found = distribution._ruled(logits(sequence), list(state.positions(())))[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


@given(
    sequence=LOGITS,
    biases=st.dictionaries(st.integers(0, SIZE + 3), st.floats(-100, 100, width=32)),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    penalty=st.sampled_from([1.0, 1.5]),
    allowed=st.sets(st.integers(1, SIZE - 1), min_size=1),
    constrained=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_biases_are_added_before_all_else(
    sequence: list[float],
    biases: dict[int, float],
    temperature: float,
    penalty: float,
    allowed: set[int],
    constrained: bool,
    seed: int,
) -> None:
    """Against numpy: the token of the biased logits, of those that the constraint allows."""
    scores = np.array(sequence, np.float32)
    for token, bias in biases.items():
        if token < SIZE:
            scores[token] += np.float32(bias)
    if constrained:
        scores[sorted(set(range(SIZE)) - allowed)] = -np.inf
    scores[3] = scores[3] / penalty if scores[3] > 0 else scores[3] * penalty
    chosen: dict[str, Any] = {"temperature": temperature, "repetition_penalty": penalty}
    if constrained:
        chosen["regex"] = "|".join(f"{token},{token}" for token in sorted(allowed))
    plain = spec([3], **chosen, seed=seed, logit_bias=tuple(biases.items()))
    state = Sampler(ListGrammars()).open(plain)
    (token,) = tokens(logits(sequence), state)
    if temperature:
        shares = np.exp((scores - scores.max()).astype(np.float64) / temperature)
        target, below = uniform(seed, 0) * shares.sum(), shares[:token].sum()
        assert below - 1e-3 <= target <= below + shares[token] + 1e-3
    else:
        assert scores[token] == scores.max()


MIXED: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.5, "top_k": 3, "seed": 2},
    {"temperature": 1.0, "top_p": 0.4, "seed": 3},
    {"temperature": 1.0, "min_p": 0.3, "seed": 4, "presence_penalty": 0.4},
    {"repetition_penalty": 1.8, "frequency_penalty": 0.2},
    {"temperature": 0.9, "repetition_penalty": 0.6, "logprobs": True, "top_logprobs": 3},
    {"logit_bias": ((3, 2.5), (5, -100.0)), "min_p": 0.01, "temperature": 1.0, "seed": 5},
    {"logit_bias": ((4, 1.5), (99, 9.0)), "logprobs": True, "top_logprobs": 1},
    {"min_tokens": 20, "stop_token_ids": frozenset({1, 2})},
    {"temperature": 1.2, "regex": "1,2,3|3,2,1,1,1,1,1,1,1|5", "logprobs": True, "top_logprobs": 2},
)


def mixed() -> list[SamplingState]:
    sampler = Sampler(ListGrammars())
    return [sampler.open(spec([1, 2, 3], **changes)) for changes in MIXED]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(3)
    together, alone = mixed(), mixed()
    for _ in range(3):
        scores = torch.randn(len(MIXED), SIZE)
        before = scores.clone()
        found = draw(scores, *together)
        assert found == [draw(scores[i : i + 1], sequence)[0] for i, sequence in enumerate(alone)]
        assert torch.equal(scores, before)


@given(st.integers(0, 2**32), st.integers(0, 8), st.sampled_from(MIXED))
def test_a_row_opened_in_the_middle_goes_on_alike(
    seed: int, cut_at: int, changes: dict[str, Any]
) -> None:
    scores = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(ListGrammars())
    whole = sampler.open(spec([4, 1], **changes))
    drawn: list[int] = []
    for sequence in scores:
        step = sampler.draw(sequence[None], [DrawRequest(whole)])[0]
        if step.error or drawn[-1:] == [0]:
            break
        drawn += step.token_ids
    cut_at = min(cut_at, len(drawn))
    resumed = sampler.open(spec([4, 1], drawn[:cut_at], **changes))
    again = [
        token
        for sequence in scores[cut_at : len(drawn)]
        for token in sampler.draw(sequence[None], [DrawRequest(resumed)])[0].token_ids
    ]
    assert drawn[:cut_at] + again == drawn


@given(st.integers(0, 2**32), st.sampled_from(MIXED), st.data())
def test_drafts_change_nothing(seed: int, changes: dict[str, Any], data: Any) -> None:
    """Logits that depend on the tokens before, as a model's do; drafts that are right, wrong, or both in turn."""
    sampler = Sampler(ListGrammars())

    def behind(tokens: Sequence[int]) -> torch.Tensor:
        of = torch.Generator().manual_seed(hash((seed, *tokens)) % 2**31)
        return torch.randn(SIZE, generator=of)

    plain, produced = sampler.open(spec([4, 1], **changes)), list[int]()
    logprobs = []
    stops = changes.get("stop_token_ids", frozenset())
    while len(produced) < 12:
        step = sampler.draw(behind(produced)[None], [DrawRequest(plain)])[0]
        if step.error:
            break
        produced += step.token_ids
        logprobs += step.logprobs
        if produced[-1] in stops:
            break
    drafting, found, found_logprobs = sampler.open(spec([4, 1], **changes)), list[int](), []
    while len(found) < len(produced):
        drafted = produced[len(found) :][: data.draw(st.integers(0, 4))][
            : len(produced) - len(found) - 1
        ]
        if drafted and data.draw(st.booleans()):
            drafted[data.draw(st.integers(0, len(drafted) - 1))] = data.draw(
                st.integers(0, SIZE - 1)
            )
        sequences = [behind([*found, *drafted[:i]]) for i in range(len(drafted) + 1)]
        step = sampler.draw(torch.stack(sequences), [DrawRequest(drafting, drafted)])[0]
        assert step.token_ids
        assert step.error == ""
        found += step.token_ids
        found_logprobs += step.logprobs
    assert found == produced
    assert found_logprobs == logprobs


def test_nothing_follows_a_stop_token() -> None:
    sequence = opened(stop_token_ids=frozenset({1}))
    found = Sampler().draw(logits([0, 9, 0], [0, 0, 9]), [DrawRequest(sequence, (1,))])
    assert found == [DrawResult((1,))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_that_is_too_short_cannot_stop(temperature: float) -> None:
    sequence = opened(temperature=temperature, min_tokens=3, stop_token_ids=frozenset({1, 2}))
    found = [tokens(logits([0, 99, 98, 1]), sequence)[0] for _ in range(4)]
    assert not {1, 2} & set(found[:3])
    assert found[3] == 1


def test_drafts_reach_over_the_border_of_min_tokens() -> None:
    sequence = opened(min_tokens=1, stop_token_ids=frozenset({1}))
    found = Sampler().draw(logits([0, 9, 1], [0, 9, 1]), [DrawRequest(sequence, (2,))])
    assert found == [DrawResult((2, 1))]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_follow_temperature_and_precede_cuts(temperature: float) -> None:
    state = opened(
        [0],
        temperature=temperature,
        top_k=1,
        repetition_penalty=2.0,
        logprobs=True,
        top_logprobs=2,
    )
    (found,) = draw(logits([3.0, 2.0, 1.0]), state)
    expected = (torch.tensor([1.5, 2.0, 1.0]) / (temperature or 1)).log_softmax(0).tolist()
    assert found.token_ids == (1,)
    (logprobs,) = found.logprobs
    assert logprobs.logprob == pytest.approx(expected[1])
    assert [token for token, _ in logprobs.top] == [1, 0]
    assert [value for _, value in logprobs.top] == pytest.approx([expected[1], expected[0]])


def test_rows_with_and_without_logprobs_share_a_draw() -> None:
    scores = logits([0, 0], [0, 0], [0, 0], [0, 5])
    found = draw(
        scores,
        opened(logprobs=True),
        opened(),
        opened(logprobs=True, top_logprobs=1),
        opened(logprobs=True, top_logprobs=32),
    )
    assert found[0].logprobs[0].logprob == pytest.approx(math.log(0.5))
    assert [len(d.logprobs[0].top) if d.logprobs else None for d in found] == [0, None, 1, 2]
    assert [token for token, _ in found[3].logprobs[0].top] == [1, 0]


def test_alternatives_are_tokens_that_can_come() -> None:
    sequence = Sampler(ListGrammars()).open(spec(regex="1|2", logprobs=True, top_logprobs=5))
    (found,) = draw(torch.zeros(1, SIZE), sequence)
    assert [token for token, _ in found.logprobs[0].top] == [1, 2]
    assert found.logprobs[0].logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 1.0, "logprobs": True}, {"top_p": 0.5, "temperature": 1.0, "min_p": 0.1}],
)
def test_sequence_without_distribution_fails_alone(wrong: float, changes: dict[str, Any]) -> None:
    found = draw(logits([0, wrong, 1], [0, 2, 1]), opened(**changes), opened(**changes))
    assert found[0] == DrawResult(error=NO_DISTRIBUTION)
    assert found[1].token_ids
    assert not found[1].error


def test_an_error_behind_a_draft_leaves_the_tokens_before_it() -> None:
    sequence = opened()
    found = Sampler().draw(logits([0, 9], [math.nan, 0]), [DrawRequest(sequence, (1,))])
    assert found == [DrawResult((1,), error=NO_DISTRIBUTION)]


def test_a_token_without_probability_is_never_drawn() -> None:
    state = opened(temperature=1.0, seed=5)
    scores = logits([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert {tokens(scores, state)[0] for _ in range(512)} == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 1e-5, 100.0])
def test_every_temperature_leaves_numbers(temperature: float) -> None:
    state = opened(temperature=temperature, logprobs=True)
    (found,) = draw(logits([1e4, -1e4, 0.0]), state)
    assert found.token_ids[0] in range(3)
    assert found.logprobs[0].logprob <= 0


def test_a_constraint_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        Sampler().open(spec(regex="1"))


def test_produced_tokens_that_break_the_constraint_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="do not match"):
        Sampler(ListGrammars()).open(spec(produced=[1, 3], regex="1,2"))
