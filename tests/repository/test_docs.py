"""What the documents name is there: links, files, folders."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))

    local = [link for link in links if "://" not in link]

    assert [link for link in local if not (document.parent / link).exists()] == []


NAMED = re.compile(
    r"(?<![\w/.-])((?:batcher|bench|compose|distributions|docs|examples|gateway|jobs|learning|model_workers|protos|scripts|simulator"
    r"|sluice|supervisor|tests)/[\w./-]*[\w/])"
)


def test_files_and_folders_that_documents_name_are_there() -> None:
    named = {
        (str(document.relative_to(ROOT)), path)
        for document in DOCUMENTS
        if document.name != "CHANGELOG.md"  # it names what was removed
        for path in NAMED.findall(document.read_text(encoding="utf-8"))
    }

    assert len(named) > 50
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()] == []


README_LINES_MAX = 120
COLUMNS_MAX = 100


def test_readme_is_short_and_wrapped() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()

    assert len(lines) <= README_LINES_MAX
    prose = [line for line in lines if not line.startswith("|")]  # tables cannot be wrapped
    assert [line for line in prose if len(line) > COLUMNS_MAX] == []
