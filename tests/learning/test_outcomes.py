"""Outcomes that are refused name source and row."""

import pytest

from learning.outcomes import BadOutcomes, RouterOutcome, Source, merge

Rows = list[dict[str, str | None]]


def rows(count: int = 40) -> Rows:
    return [
        {"prompt_id": f"p{at}", "prompt": f"text {at}", "weak": str(at % 2), "strong": "1"}
        for at in range(count)
    ]


def gathered(given: Rows) -> list[RouterOutcome]:
    return merge([Source("a.csv", list(given[0]), given)])


def changed(at: int, **cells: str | None) -> Rows:
    given = rows()
    given[at].update(cells)
    return given


REFUSED: dict[str, tuple[Rows, str]] = {
    "too large": (changed(3, weak="1.5"), r"row 5: weak is 1\.5, outside \[0, 1\]"),
    "too small": (changed(3, strong="-0.1"), r"row 5: strong is -0\.1, outside"),
    "not finite": (changed(3, weak="nan"), r"row 5: weak is nan, outside"),
    "no number": (changed(3, weak="yes"), r"row 5: weak is 'yes', not a number"),
    "no label": (changed(3, weak=None), r"row 5: weak is empty"),
    "no prompt": (changed(3, prompt=" "), r"row 5: prompt is empty"),
    "twice": (changed(3, prompt_id="p0"), r"row 5: prompt_id 'p0' is already in a\.csv row 2"),
    "no column": (
        [{"prompt_id": "a", "prompt": "b", "weak": "1"}],
        r"row 1: no column strong; there are prompt_id, prompt, weak",
    ),
    "one class": (
        [{**row, "weak": "1", "strong": "0"} for row in rows()],
        "rows 2 to 41: only one class, weak is 1",
    ),
    "no gain": (
        [{**row, "strong": row["weak"]} for row in rows()],
        "rows 2 to 41: only one class, strong never differs",
    ),
    "few": (rows(3), ": 3 outcomes, at least 30"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outcomes_are_refused_with_their_place(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(BadOutcomes, match=rf"a\.csv:? ?{message.removeprefix(': ')}"):
        gathered(given)


def test_sources_are_merged_and_ids_count_across_them() -> None:
    more = [{**row, "prompt_id": f"q{row['prompt_id']}"} for row in rows()]
    sources = [Source(name, list(rows()[0]), each) for name, each in (("a", rows()), ("b", more))]
    assert len(merge(sources)) == 80
    with pytest.raises(BadOutcomes, match="b row 2: prompt_id 'p0' is already in a row 2"):
        merge([Source(name, list(rows()[0]), rows()) for name in ("a", "b")])


def test_a_source_may_repeat_what_came_before() -> None:
    columns = list(rows()[0])
    newer = [{**row, "weak": "0.5"} for row in [*rows(), {**rows()[0], "prompt_id": "new"}]]
    found = merge([Source("a", columns, rows()), Source("b", columns, newer, repeats=True)])
    assert [row.prompt_id for row in found[38:]] == ["p38", "p39", "new"]
    assert (found[0].weak, found[40].weak) == (0.0, 0.5)


def test_labels_between_are_kept_and_an_empty_answer_is_none() -> None:
    given: Rows = [{**row, "weak_response": ""} for row in changed(0, weak="0.25")]
    found = gathered(given)[0]
    assert (found.weak, found.answer, found.weight) == (0.25, None, 1.0)
