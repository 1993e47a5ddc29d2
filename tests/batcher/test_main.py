"""The process: what it says when it cannot start."""

import subprocess
import sys
from pathlib import Path

import pytest


def start(config: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "sluice.yaml"
    path.write_text(config, encoding="utf-8")
    return subprocess.run(
        (sys.executable, "-m", "batcher", "--config", str(path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("nonsense: 1", "nonsense"),
        ("nats: {url: 'nats://127.0.0.1:1'}", "triton.url: is not set"),
        ("triton: {url: '127.0.0.1:1'}", "nats.url: is not set"),
        (
            "triton: {url: '127.0.0.1:1'}\nnats: {url: 'nats://127.0.0.1:1', connect_s: 0.3}",
            "start one or set nats.url",
        ),
    ],
)
def test_a_setup_error_is_one_line_and_not_exit_code_0(
    tmp_path: Path, config: str, words: str
) -> None:
    ended = start(config, tmp_path)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("batcher: ")]
    assert words in line
    assert "Traceback" not in ended.stderr
