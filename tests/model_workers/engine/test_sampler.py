import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_workers.engine import sampler
from model_workers.engine.protocol import Sampling
from model_workers.engine.sampler import Draw, sample, uniform

SIZE = 12
LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=SIZE, max_size=SIZE)
DRAWS = 4096


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def drawn(scores: torch.Tensor, *draws: Draw) -> list[int]:
    found = sample(scores, draws)
    return [token.token_id for token in found if token is not None]


def test_splitmix64_is_the_published_one() -> None:
    # First outputs of the reference implementation with state 0.
    assert sampler._mixed(sampler._GAMMA) == 0xE220A8397B1DCDAF
    assert sampler._mixed(2 * sampler._GAMMA & sampler._MASK) == 0x6E789E6AA1B965F4


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_a_function_into_the_unit_interval(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert 0 <= number < 1
    assert number == uniform(seed, index)


@pytest.mark.parametrize("by", ["seed", "index"])
def test_uniform_is_even_in_seed_and_index(by: str) -> None:
    numbers = [uniform(i, 3) if by == "seed" else uniform(3, i) for i in range(DRAWS)]
    counts = Counter(int(number * 16) for number in numbers)
    # Four standard deviations of a binomial count.
    spread = 4 * math.sqrt(DRAWS * (1 / 16) * (15 / 16))
    assert all(abs(counts[i] - DRAWS / 16) < spread for i in range(16))


def test_greedy_takes_the_most_probable() -> None:
    assert drawn(logits([0, 3, 1], [5, 3, 1]), *[Draw(Sampling(1), 0)] * 2) == [1, 0]


@settings(deadline=None)
@given(LOGITS, st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_the_token_is_where_the_distribution_passes_the_number(
    row: list[float], seed: int, index: int
) -> None:
    (token,) = drawn(logits(row), Draw(Sampling(1, temperature=1.0, seed=seed), index))
    shares = [math.exp(value - max(row)) for value in row]
    target = uniform(seed, index) * sum(shares)
    below = math.fsum(shares[:token])
    assert below - 1e-4 <= target <= below + shares[token] + 1e-4


def test_counts_follow_the_probabilities() -> None:
    row = [0.0, 1.0, 2.0, -1.0, -30.0]
    shares = torch.tensor(row).softmax(0).tolist()
    draws = [Draw(Sampling(1, temperature=1.0, seed=11), i) for i in range(DRAWS)]
    counts = Counter(drawn(logits(*[row] * DRAWS), *draws))
    for token, share in enumerate(shares):
        assert abs(counts[token] - DRAWS * share) <= 4 * math.sqrt(DRAWS * share) + 1e-3


@settings(deadline=None, max_examples=60)
@given(
    row=LOGITS,
    temperature=st.floats(0.125, 2, width=16),
    top_k=st.integers(0, SIZE),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    penalty=st.sampled_from([0.5, 1.0, 1.7]),
    seen=st.sets(st.integers(0, SIZE - 1)),
)
def test_what_can_be_drawn_is_what_the_processors_of_transformers_leave(
    row: list[float], temperature: float, top_k: int, top_p: float, penalty: float, seen: set[int]
) -> None:
    marks = torch.zeros(SIZE, dtype=torch.bool)
    marks[list(seen)] = True
    draw = Draw(Sampling(1, temperature, top_p, top_k, repetition_penalty=penalty), 0, marks)
    # Ties at the border of top-k and top-p are broken differently there.
    scores = logits(row) + torch.arange(SIZE) * 1e-3
    processors: Any = LogitsProcessorList()
    if seen:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    expected = processors(torch.tensor([sorted(seen)]), scores.clone()).softmax(-1)
    tempered = sampler._tempered(sampler._penalised(scores, [draw]), [draw])
    found = sampler._filtered(tempered, [draw]).softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(3)
    scores = torch.randn(6, SIZE)
    marks = torch.arange(SIZE) % 2 == 0
    draws = [
        Draw(Sampling(1), 0),
        Draw(Sampling(1, temperature=0.7, seed=1), 5),
        Draw(Sampling(1, temperature=1.5, top_k=3, seed=2), 6),
        Draw(Sampling(1, temperature=1.0, top_p=0.4, seed=3), 7),
        Draw(Sampling(1, repetition_penalty=1.8, seed=4), 8, marks),
        Draw(Sampling(1, temperature=0.9, repetition_penalty=0.6, logprobs=True), 9, marks),
    ]
    together = sample(scores, draws)
    assert together == [sample(scores[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_are_after_penalty_and_temperature_and_before_top_k(temperature: float) -> None:
    marks = torch.tensor([True, False, False])
    sampling = Sampling(
        1, temperature, top_k=1, repetition_penalty=2.0, logprobs=True, top_logprobs=2
    )
    (found,) = sample(logits([3.0, 2.0, 1.0]), [Draw(sampling, 0, marks)])
    expected = (torch.tensor([1.5, 2.0, 1.0]) / (temperature or 1)).log_softmax(0).tolist()
    assert found is not None
    assert found.logprobs is not None
    assert found.token_id == 1
    assert found.logprobs.logprob == pytest.approx(expected[1])
    assert [token for token, _ in found.logprobs.top] == [1, 0]
    assert [value for _, value in found.logprobs.top] == pytest.approx([expected[1], expected[0]])


def test_logprobs_without_alternatives() -> None:
    (found,) = sample(logits([0.0, 0.0]), [Draw(Sampling(1, logprobs=True), 0)])
    assert found is not None
    assert found.logprobs is not None
    assert found.logprobs.top == ()
    assert found.logprobs.logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=1.0, logprobs=True)])
def test_a_row_without_a_distribution_is_none_and_leaves_the_others(
    wrong: float, sampling: Sampling
) -> None:
    found = sample(logits([0, wrong, 1], [0, 2, 1]), [Draw(sampling, 0)] * 2)
    assert found[0] is None
    assert found[1] is not None


def test_a_token_without_probability_is_never_drawn() -> None:
    row = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    draws = [Draw(Sampling(1, temperature=1.0, seed=5), i) for i in range(512)]
    assert set(drawn(logits(*[row] * 512), *draws)) == {1, 3}
