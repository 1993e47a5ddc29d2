"""Numbers of pages are written from results, in tables and in text."""

import pytest

from bench.support.pages import PageError, figures_of, measured, render

LINE = {
    "figure": "a_vs_b",
    "ours": 1234.56,
    "peer": 0.5,
    "ratio": 2469.1,
    "low": 2000.0,
    "high": 3000.0,
    "unit": "tokens/s",
    "machine": "EPYC, 2 cores, Python 3.11",
    "commit": "abc1234",
    "label": "single run",
    "also": {"ttft_p50_ms": 12.34, "kept": 0.996},
}
OTHER = {**LINE, "machine": "Xeon, 4 cores, Python 3.11", "ours": 7.0, "low": None, "label": ""}
RESULTS = {"a_vs_b": [LINE], "both": [LINE, OTHER]}
HEAD = (
    "| figure | what | ours | peer | ratio | TTFT <!-- ttft_p50_ms --> | measured |\n"
    "|---|---|---|---|---|---|---|\n"
)


def test_rows_of_tables_of_figures() -> None:
    page = (
        HEAD + "| `a_vs_b` | 64 callers | 1 | | | 1 ms | |\n\n| other | 5 |\n|---|---|\n| x | 5 |"
    )

    found = render(page, RESULTS).splitlines()

    assert found[2] == (
        "| `a_vs_b` | 64 callers | 1,235 tokens/s | 0.500 tokens/s | 2,469 (2,000 to 3,000) | 12.3 "
        "| EPYC, 2 cores, abc1234, single run |"
    )
    assert found[6] == "| x | 5 |"


def test_a_row_has_a_line_for_each_processor() -> None:
    row = render(HEAD + "| `both` | what | | | | | |", RESULTS).splitlines()[2]

    assert row.split("|")[3] == " 1,235 tokens/s<br>7.00 tokens/s "
    assert row.split("|")[5] == " 2,469 (2,000 to 3,000)<br>2,469 "
    assert row.split("|")[7] == " EPYC, 2 cores, abc1234, single run<br>Xeon, 4 cores, abc1234 "


def test_numbers_in_text() -> None:
    page = "It keeps 1 %<!-- a_vs_b.kept --> at 5 ms<!-- a_vs_b.ttft_p50_ms --> and 3 of 4."

    assert render(page, RESULTS) == page.replace("1 %", "99.6 %").replace("5 ms", "12.3 ms")
    assert set(figures_of(page)) == {"a_vs_b"}


@pytest.mark.parametrize(
    "page", ["1<!-- unknown.ours -->", "1<!-- a_vs_b.unknown -->", HEAD + "| `a_vs_b` | | 1 | |"]
)
def test_what_is_not_in_the_results_is_an_error_with_its_line(page: str) -> None:
    with pytest.raises(PageError, match=r"line \d"):
        render(page, RESULTS)


def test_a_figure_without_a_line_has_not_been_measured() -> None:
    page = HEAD + "| `unknown` | 64 callers | 5 | 6 | 7 | 8 | abc |"

    row = render(page, RESULTS).splitlines()[2]
    assert row == "| `unknown` | 64 callers | | | | 8 | not measured |"
    assert list(figures_of(page)) == ["unknown"]


def test_what_limits_a_figure_stands_beside_its_commit() -> None:
    assert measured({**OTHER, "limits": "old seeds"}) == "Xeon, 4 cores, abc1234, old seeds"
    assert measured({**OTHER, "load": 1.6}) == "Xeon, 4 cores, abc1234, load 1.6"
