"""The blocking client is what the asyncio client generates."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_blocking_client_is_generated_from_the_asyncio_client(tmp_path: Path) -> None:
    fresh = tmp_path / "blocking.py"
    command = [sys.executable, str(ROOT / "scripts/gen_client"), str(fresh)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)

    committed = (ROOT / "sluice/client/blocking.py").read_text()

    assert committed == fresh.read_text(), "run scripts/gen_client"
    assert committed.startswith("# Generated")
