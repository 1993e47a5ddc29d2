"""The tree keeps its shape: what lies at the top, and how large files are."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEIGHTS = Path("model_workers/models")
MIB = 1024 * 1024


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git work tree")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30
    )
    names = listing.stdout.decode("utf-8").split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def test_no_file_is_large_except_the_weights() -> None:
    large = [
        str(path)
        for path in tracked_files()
        if (ROOT / path).stat().st_size > 2 * MIB and not path.is_relative_to(WEIGHTS)
    ]

    assert large == []


def test_the_weights_stay_small() -> None:
    sizes = [
        (ROOT / path).stat().st_size for path in tracked_files() if path.is_relative_to(WEIGHTS)
    ]

    assert sum(sizes) <= 24_000_000


def test_scripts_can_be_executed() -> None:
    scripts = [
        path for path in tracked_files() if path.parts[0] in ("scripts", ".ci") and not path.suffix
    ]

    assert scripts
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111, script
