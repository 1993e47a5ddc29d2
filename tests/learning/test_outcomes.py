"""Outcomes that are refused name source and row."""

from collections.abc import Mapping
from typing import Any

import pytest

from learning.outcomes import BadOutcomes, RouterOutcome, Source, merge

Rows = list[dict[str, str | None]]


def rows(count: int = 40) -> Rows:
    return [
        {"prompt_id": f"p{at}", "prompt": f"text {at}", "weak": str(at % 2), "strong": "1"}
        for at in range(count)
    ]


def gathered(given: Rows, **more: Any) -> list[RouterOutcome]:
    columns = list(given[0]) if given else ["prompt_id", "prompt", "weak", "strong"]
    return merge([Source("a.csv", columns, given, **more)])


def changed(at: int, **cells: str | None) -> Rows:
    given = rows()
    given[at].update(cells)
    return given


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"weak": "1.5"}, r"a\.csv row 5: weak is 1\.5, outside \[0, 1\]"),
        ({"strong": "-0.1"}, r"a\.csv row 5: strong is -0\.1, outside"),
        ({"weak": "nan"}, r"a\.csv row 5: weak is nan, outside"),
        ({"weak": "yes"}, r"a\.csv row 5: weak is 'yes', not a number"),
        ({"weak": None}, r"a\.csv row 5: weak is empty"),
        ({"prompt": " "}, r"a\.csv row 5: prompt is empty"),
        ({"prompt_id": "p0"}, r"a\.csv row 5: prompt_id 'p0' is already in a\.csv row 2"),
    ],
)
def test_a_bad_row(cells: Mapping[str, str | None], message: str) -> None:
    with pytest.raises(BadOutcomes, match=message):
        gathered(changed(3, **cells))


def test_missing_columns() -> None:
    given = [{"prompt_id": "a", "prompt": "b", "weak": "1"}]
    with pytest.raises(
        BadOutcomes, match=r"a\.csv row 1: no column strong; there are prompt_id, prompt, weak"
    ):
        gathered([dict(row) for row in given])


def test_one_class() -> None:
    alike = [{**row, "weak": "1", "strong": "0"} for row in rows()]
    with pytest.raises(BadOutcomes, match="rows 2 to 41: only one class, weak is 1"):
        gathered(alike)
    same = [{**row, "strong": row["weak"]} for row in rows()]
    with pytest.raises(BadOutcomes, match="rows 2 to 41: only one class, strong never differs"):
        gathered(same)


def test_too_few() -> None:
    with pytest.raises(BadOutcomes, match="3 outcomes, at least 30"):
        gathered(rows(3))


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
