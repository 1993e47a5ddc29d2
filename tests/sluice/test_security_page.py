"""docs/operate/security.md names a test for every attack, and each of them is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows() -> Iterator[tuple[str, str]]:
    """What, and its tests, of each table with a column of tests."""
    has_tests = False
    for line in (ROOT / "docs/operate/security.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            has_tests = False
        elif cells[-1] == "test":
            has_tests = True
        elif has_tests and set(line) - set("|- "):
            yield " ".join(cells[:-1]), cells[-1]


ROWS = dict(rows())


def test_the_page_has_the_table_of_attacks() -> None:
    assert any(what.startswith("who left") for what in ROWS)


@pytest.mark.parametrize("what", ROWS)
def test_what_is_stopped_has_tests(what: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", ROWS[what])
    assert len(named) == ROWS[what].count("`") / 2 > 0
    for file, function in named:
        test = rf"^(async )?def {function}\(" if function else r"^(async )?def test_"
        assert re.search(test, (ROOT / file).read_text(), re.MULTILINE), (file, function)
