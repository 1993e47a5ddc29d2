"""Numbers on pages are those of bench/results, bench/results holds what the page of figures shows, and what is said of
speed elsewhere names its figure."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.harness import ROOT, ROUNDS
from bench.support.pages import figures_of, load_results, read_lines, render
from bench.support.record import FILE, PAGES, RESULTS

PAGE = ROOT / "docs/internals/benchmarks.md"
FIGURES_MAX = 40
PLANS = ("process_cost_", "plan_")
"""What `sluice plan` computes with, and what it says beside measured meshes: on its own page."""
SPEED = re.compile(
    r"\d (?:tokens|requests|calls|answers|documents|items|decisions|messages|publishes|responses|rows)/s\b(?!<!--)"
    r"|\d (?:tokens|requests|calls|messages|publishes|responses|rows) (?:a|per) second\b"
    r"|\d (?:us|µs|microseconds)\b(?!<!--)"
    r"|\d(?: times|x) (?:faster|slower|as fast|as slow)\b"
)
FAULTS = ROOT / "docs/concepts/faults.md"
DECISIONS = ROOT / "docs/internals/decisions"
"""Decisions have what was measured for them then."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_numbers_on_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    # scripts/figures --pages writes them.
    assert text == render(text, load_results(RESULTS))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_quotes_figures_of_the_one_page_alone(page: Path) -> None:
    shown = set(figures_of(PAGE.read_text(encoding="utf-8")))
    quoted = set(figures_of(page.read_text(encoding="utf-8")))

    assert {name for name in quoted - shown if not name.startswith(PLANS)} == set()


def test_the_page_has_few_figures_and_results_have_no_others() -> None:
    shown = list(figures_of(PAGE.read_text(encoding="utf-8")))

    assert len(set(shown)) <= FIGURES_MAX
    assert {line["figure"] for line in read_lines(FILE)} <= set(shown)


def speeds(page: Path) -> Iterator[str]:
    """Lines of a page that say how fast something is, without a table of figures or the name of one."""
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= line.startswith("```")
        if SPEED.search(line) and not in_code and not line.startswith(("| `", "    ")):
            yield f"{number}: {line}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != FAULTS and DECISIONS not in page.parents],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_speed_stands_in_tables_of_figures_or_names_its_figure(page: Path) -> None:
    assert list(speeds(page)) == []


def test_figures_have_enough_rounds_and_a_machine() -> None:
    for line in (line for lines in load_results(RESULTS).values() for line in lines):
        assert line["commit"], line["figure"]
        assert {"settings", "versions", "label"} <= set(line), line["figure"]
        # Lines of before this rule say it themselves.
        assert line["runs"] >= ROUNDS or line.get("limits"), line["figure"]
