import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_workers.engine.sampling import distribution as module
from model_workers.engine.sampling.distribution import uniform

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


@pytest.mark.parametrize("count", [3, 97])
def test_scores_on_a_device_are_ordered_without_the_host(count: int) -> None:
    # A tensor of this device has no values that could be copied to the host.
    scores = torch.empty(4, 97, device="meta")
    assert module._ordered(scores, count).shape == (4, count)
