"""Numbers on pages are those of bench/results, and bench/results holds figures that can be told from each other."""

import re
from pathlib import Path

import pytest

from bench.support.harness import MIN_RUNS
from bench.support.pages import load_results, render
from bench.support.record import PAGES, RESULTS, ROOT

RATE = re.compile(r"\d (?:tokens|requests|answers|documents|decisions)/s\b(?!<!--)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_numbers_on_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    # scripts/bench --pages writes them.
    assert text == render(text, load_results(RESULTS))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rates_stand_in_tables_of_figures_or_name_theirs(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if RATE.search(line) and not line.startswith("| `")] == []


def test_every_figure_has_enough_runs_and_says_where_it_was_measured() -> None:
    lines = [line for lines in load_results(RESULTS).values() for line in lines.values()]

    assert len(lines) > 20
    for line in lines:
        assert line["commit"], line["figure"]
        assert {"settings", "versions", "label"} <= set(line), line["figure"]
        # Lines of before this rule say it themselves.
        assert line["runs"] >= MIN_RUNS or line["label"] or line.get("limits"), line["figure"]
