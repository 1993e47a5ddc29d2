"""The growth of memory out of samples, and a short slice of the load."""

import pytest

from tests.robustness.soak import Samples, growth


def test_a_line_is_found_with_its_uncertainty() -> None:
    exact = growth([(1000 * i, 100.0 + 3 * i) for i in range(10)])
    assert (exact.slope, exact.half_width) == (pytest.approx(3), pytest.approx(0))
    noisy = growth([(1000 * i, 100.0 + (i % 2)) for i in range(40)])
    assert abs(noisy.slope) < noisy.half_width < 0.1


def test_the_warm_up_is_left_out() -> None:
    samples = Samples()
    for count, kib in ((0, 0.0), (1000, 500.0), (2000, 510.0), (3000, 520.0)):
        samples.add(count, {"gateway": kib})
    assert samples.growth("gateway", 1000).slope == pytest.approx(10)
