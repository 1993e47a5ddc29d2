"""The pages of docs/reference are what the code says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_reference_pages_are_fresh(tmp_path: Path) -> None:
    """`scripts/reference` writes them."""
    script = [sys.executable, str(ROOT / "scripts" / "reference"), str(tmp_path)]
    subprocess.run(script, check=True, timeout=120)
    for page in tmp_path.iterdir():
        assert (ROOT / "docs" / "reference" / page.name).read_text() == page.read_text(), page.name
