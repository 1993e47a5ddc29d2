"""The arithmetic kinds: sort a list of amounts, add amounts up. Amounts are whole euros."""

from random import Random
from typing import Final

from model_workers.tiers.example import Example, Level

_SORT_PHRASES: Final = (
    "Sort ascending: {}",
    "Sort these amounts from low to high: {}",
    "Put in order, smallest first: {}",
    "Order these invoices by amount, lowest first: {}",
    "Please sort {}",
)
_TOTAL_PHRASES: Final = (
    "Add up: {}",
    "What is the total of {}?",
    "Total these amounts: {}",
    "Sum of {}",
    "The customer bought items for {} euros. What is the total?",
)
# The working is written units first, all at one width: a carry then only ever depends on digits
# already written, and every digit finds its operands at a constant distance.
_WIDTH: Final = 4


def sort_example(rng: Random, level: Level) -> Example:
    """Sort 3 numbers (easy), 4 to 6 (mid) or 7 to 9 (hard, 2 and 3 digits)."""
    if level == "easy":
        numbers = [_amount(rng, rng.choice((1, 2, 2))) for _ in range(3)]
    elif level == "mid":
        numbers = [_amount(rng, rng.choice((1, 2, 3))) for _ in range(rng.randint(4, 6))]
    else:
        numbers = [_amount(rng, rng.choice((2, 3))) for _ in range(rng.randint(7, 9))]
    prompt = rng.choice(_SORT_PHRASES).format(_join(numbers))
    return Example("sort", level, prompt, _join(sorted(numbers)), _content(numbers), 64)


def total_example(rng: Random, level: Level) -> Example:
    """Add 2 numbers of 1 or 2 digits (easy), 2 or 3 of up to 3 (mid), 4 to 6 of 3 digits (hard)."""
    if level == "easy":
        numbers = [_amount(rng, rng.choice((1, 2, 2))) for _ in range(2)]
    elif level == "mid":
        numbers = [_amount(rng, rng.choice((2, 3))) for _ in range(rng.randint(2, 3))]
    else:
        numbers = [_amount(rng, 3) for _ in range(rng.randint(4, 6))]
    prompt = rng.choice(_TOTAL_PHRASES).format(_join(numbers))
    return Example("total", level, prompt, total_answer(numbers), _content(numbers), 96)


def total_answer(numbers: list[int]) -> str:
    """The answer to a sum: the working, amount by amount, and the total."""
    running = numbers[0]
    steps = [_units_first(running)]
    for number in numbers[1:]:
        running += number
        steps.append(f"+{_units_first(number)} ={_units_first(running)}")
    return f"Units first: {' '.join(steps)}\nTotal: {running}"


def _units_first(number: int) -> str:
    return f"{number:0{_WIDTH}d}"[::-1]


def _amount(rng: Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1), 10**digits - 1)


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _content(numbers: list[int]) -> str:
    # The order of the numbers is phrasing too: a held-out set of numbers is new in every order.
    return _join(sorted(numbers))
