import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.protocol import Sampling
from model_workers.engine.sampling import distribution as module
from model_workers.engine.sampling.distribution import cut, lowest_bisected, uniform

DRAWS = 4096


def test_splitmix64_is_the_published_one() -> None:
    # First outputs of the reference implementation with state 0.
    assert module._mixed(module._GAMMA) == 0xE220A8397B1DCDAF
    assert module._mixed(2 * module._GAMMA & module._MASK) == 0x6E789E6AA1B965F4


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


# Near 1 the sums of float32 and of float64 may round to different sides; from 1 on nothing is cut, for which 2 stands.
@given(
    st.integers(0, 2**31),
    st.integers(1, 60),
    st.floats(0.01, 0.99) | st.just(2.0),
    st.booleans(),
)
def test_halving_keeps_what_sorting_keeps(seed: int, top_k: int, top_p: float, ties: bool) -> None:
    torch.manual_seed(seed)
    scores = torch.randn(4, 50) * 4
    scores[1, 3:9] = -torch.inf
    if ties:
        # Of equal scores all stay, where top-k alone cuts between them in a sorted row.
        scores, top_k = scores.round(), 50
    scores -= scores.amax(-1, True)
    lowest = lowest_bisected(scores, torch.full((4, 1), top_k), torch.full((4, 1), top_p))
    expected = cut(scores, [Sampling(1, 1.0, top_p=top_p, top_k=min(top_k, 50))] * 4)
    assert torch.equal(scores.masked_fill(scores < lowest, -torch.inf), expected)
