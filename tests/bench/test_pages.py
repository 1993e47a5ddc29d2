"""Numbers of pages are written from results, in tables and in text."""

import pytest

from bench.support.pages import PageError, measured, render, shown

LINE = {
    "figure": "a_vs_b",
    "ours": 1234.56,
    "peer": 0.5,
    "ratio": 2469.1,
    "unit": "tokens/s",
    "commit": "abc1234",
    "label": "single run",
    "also": {"ttft_p50_ms": 12.34, "kept": 0.996},
}
RESULTS = {"cpu-2-cores": {"a_vs_b": LINE}, "h200": {"a_vs_b": {**LINE, "ours": 7.0}}}
HEAD = "| figure | what | ours | TTFT <!-- ttft_p50_ms --> | measured |\n|---|---|---|---|---|\n"


def test_rows_of_tables_of_figures() -> None:
    page = (
        HEAD
        + "| `a_vs_b` | 64 callers | 1 tokens/s | 1 ms | |\n\n| other | 5 |\n|---|---|\n| x | 5 |"
    )

    found = render(page, RESULTS).splitlines()

    assert found[2] == "| `a_vs_b` | 64 callers | 1,235 tokens/s | 12.3 ms | abc1234, single run |"
    assert found[6] == "| x | 5 |"


def test_numbers_in_text() -> None:
    page = "It keeps 1 %<!-- a_vs_b.kept --> at 5 ms<!-- a_vs_b.ttft_p50_ms --> and 3 of 4."

    assert render(page, RESULTS) == page.replace("1 %", "99.6 %").replace("5 ms", "12.3 ms")


def test_results_of_another_machine() -> None:
    page = "1<!-- a_vs_b.ours -->\n<!-- results: h200 -->\n1<!-- a_vs_b.ours -->"

    assert render(page, RESULTS).splitlines()[::2] == [
        "1,235<!-- a_vs_b.ours -->",
        "7.00<!-- a_vs_b.ours -->",
    ]


@pytest.mark.parametrize(
    "page",
    [
        "1<!-- unknown.ours -->",
        "1<!-- a_vs_b.unknown -->",
        HEAD + "| `unknown` | | 1 | | |",
        HEAD + "| nothing | | 1 | | |",
    ],
)
def test_what_is_not_in_the_results_is_an_error_with_its_line(page: str) -> None:
    with pytest.raises(PageError, match=r"line \d"):
        render(page, RESULTS)


def test_a_row_without_numbers_has_not_been_measured() -> None:
    page = HEAD + "| `unknown` | 64 callers | | | |"

    assert render(page, RESULTS) == page.removesuffix("|") + "not measured |"


def test_empty_cells_of_a_measured_figure_are_filled() -> None:
    page = HEAD + "| `a_vs_b` | 64 callers | | | |"

    assert render(page, RESULTS).splitlines()[2] == (
        "| `a_vs_b` | 64 callers | 1,235 tokens/s | 12.3 | abc1234, single run |"
    )


def test_how_numbers_are_shown() -> None:
    values = (82_059.8, 328.2, 12.34, 1.005, 0.12, 0.0289, 0.0)

    assert [shown(v) for v in values] == ["82,060", "328", "12.3", "1.00", "0.120", "0.0289", "0"]


def test_what_limits_a_figure_stands_beside_its_commit() -> None:
    assert measured({**LINE, "limits": "old seeds"}) == "abc1234, single run, old seeds"
    assert measured({**LINE, "label": "", "load": 9.6}) == "abc1234, load 10"
