"""Links of the documents lead somewhere."""

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
