"""Lists of numbers: what was asked for, and whether the answer is it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.cascade.lists import READ_CHARS_MAX, is_as_asked

AMOUNTS = st.lists(st.integers(0, 999), min_size=2, max_size=9)


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


@given(AMOUNTS, st.sampled_from(["Sort {}", "Put {} in order, lowest first", "Arrange {} please"]))
def test_a_sorted_list_has_the_same_numbers_in_rising_order(
    numbers: list[int], phrase: str
) -> None:
    prompt = phrase.format(listed(numbers))
    assert is_as_asked(prompt, listed(sorted(numbers))) is True
    assert is_as_asked(prompt, listed([*sorted(numbers)[:-1], 1000])) is False
    assert is_as_asked(prompt, listed(sorted(numbers)[1:])) is False
    is_falling = sorted(numbers) == sorted(numbers, reverse=True)
    assert is_as_asked(prompt, listed(sorted(numbers, reverse=True))) is is_falling


@given(AMOUNTS, st.sampled_from(["Add up: {}", "The sum of {}?", "Bought for {} euros. In total?"]))
def test_a_total_is_the_last_number(numbers: list[int], phrase: str) -> None:
    prompt, total = phrase.format(listed(numbers)), sum(numbers)
    assert is_as_asked(prompt, f"{total}") is True
    # The working may be in any notation: what matters is where it ends.
    assert is_as_asked(prompt, f"12 + 3 = 1, so the total is {total} euros.") is True
    assert is_as_asked(prompt, f"{total + 1}") is False
    assert is_as_asked(prompt, "I cannot say") is False


@pytest.mark.parametrize(
    "prompt",
    [
        "Sort 3, 1, 2 from high to low",
        "Order 3, 1, 2, largest first",
        "Sort descending: 3, 1 and 2",
        "Put 3; 1; 2 in order, smallest last",
    ],
)
def test_falling_order(prompt: str) -> None:
    assert is_as_asked(prompt, "3, 2, 1") is True
    assert is_as_asked(prompt, "1, 2, 3") is False


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "Sort these names: Ann, Bo, Cy",
        "Sort 3, 1, 2 into 2 groups",
        "Sort and add up 3, 1, 2",
        "My order D-91198 was for 12, 13 and 14 euros",
        "Sort 1,250, 3,400",
        "Sort -3, 1, 2",
        "What is the total of 3 lamps at 5 euros each?",
        "Is 3, 1, 2 a list?",
        "Sort " + "3, 1, " * READ_CHARS_MAX,
    ],
)
def test_what_is_not_plain_is_left_alone(prompt: str) -> None:
    assert is_as_asked(prompt, "1, 2, 3") is None


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text", ["1 " * 2048, "1," * 2048, "put " * 1024, " " * 4096, "1" * 4096, "1 and " * 682]
)
def test_odd_texts_take_no_time(text: str) -> None:
    for _ in range(20):
        is_as_asked(text, text)
        is_as_asked("Sort 3, 1, 2", text)
