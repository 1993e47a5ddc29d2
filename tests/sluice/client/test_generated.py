"""The blocking client is what the asyncio client generates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["blocking.py", "jobs_blocking.py"])
def test_blocking_client_is_generated(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/gen_client"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)

    committed = (ROOT / "sluice/client" / name).read_text()

    assert committed == (tmp_path / name).read_text(), "run scripts/gen_client"
    assert committed.startswith("# Generated")
