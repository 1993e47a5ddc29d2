"""The generator is seeded, the split is sealed, and the graders tell right from wrong."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.tiers import words
from model_workers.tiers.example import CELLS, Cell
from model_workers.tiers.tasks import generate, heldout, split_of, stream, total_answer


def test_heldout_is_a_function_of_its_seed() -> None:
    assert heldout(5, 3) == heldout(5, 3)
    assert heldout(5, 3) != heldout(5, 4)


def test_heldout_has_every_cell_in_equal_parts() -> None:
    counts = dict.fromkeys(CELLS, 0)
    for example in heldout(4, 0):
        counts[example.kind, example.level] += 1
    assert set(counts.values()) == {4}


@pytest.mark.parametrize("cell", CELLS)
def test_train_and_heldout_never_share_a_task(cell: Cell) -> None:
    train = {e.content for e in generate(1, 2000, cell)}
    held_out = {e.content for e in generate(1, 200, cell, "heldout")}
    assert not train & held_out
    assert {split_of(c) for c in train} == {"train"}
    assert {split_of(c) for c in held_out} == {"heldout"}


def test_stream_draws_only_the_cells_of_its_mix() -> None:
    examples = stream(0, {("sort", "easy"): 1, ("total", "hard"): 3})
    kinds = [next(examples).kind for _ in range(200)]
    assert kinds.count("total") > kinds.count("sort") > 0


@pytest.mark.parametrize("cell", CELLS)
def test_the_right_answer_passes_and_anything_else_fails(cell: Cell) -> None:
    examples = generate(5, 30, cell)
    for example, other in pairwise(examples):
        assert example.grade(example.answer)
        assert example.grade(f"\n{example.answer} ")
        assert not example.grade("")
        assert not example.grade(example.answer[:-1])
        assert not example.grade(example.answer + " 1")
        assert other.answer == example.answer or not example.grade(other.answer)


def test_a_reply_is_graded_by_what_it_states() -> None:
    example = generate(5, 1, ("reply", "easy"))[0]
    name, order, policy, signature = example.facts
    assert example.grade(f"{name}\nThis is about {order} {policy} Have a good day.\n{signature}")
    for missing in example.facts:
        assert not example.grade(example.answer.replace(missing, ""))
    wrong = next(p for p in words.POLICIES.values() if p != policy)
    assert not example.grade(example.answer.replace(policy, wrong))


def test_a_total_is_graded_by_its_last_line() -> None:
    example = generate(5, 1, ("total", "hard"))[0]
    last = example.answer.splitlines()[-1]
    assert example.grade(last)
    assert not example.grade(f"{last}\nTotal: 1")


def test_extract_answers_are_json_copied_from_the_ticket() -> None:
    for example in generate(2, 50, ("extract", "easy")):
        found = json.loads(example.answer)
        assert list(found) == ["order", "amount"]
        assert all(value in example.prompt for value in found.values())


@given(st.lists(st.integers(1, 999), min_size=2, max_size=6))
def test_the_working_of_a_total_ends_in_the_total(numbers: list[int]) -> None:
    working, last = total_answer(numbers).splitlines()
    assert last == f"Total: {sum(numbers)}"
    assert int(working.rpartition("=")[2][::-1]) == sum(numbers)
    assert working.count("+") == len(numbers) - 1
