"""The process: what it says when it cannot start."""

import subprocess
import sys
from pathlib import Path

STARTS = """
import sys
from batcher.__main__ import main
from sluice.settings import NatsSettings

NatsSettings.connect_s = 0.5

for path in list(sys.argv[1:]):
    sys.argv[1:] = ["--config", path]
    print(main())
"""
"""One process that starts a batcher with each of its arguments, one after the other."""
WRONG = {
    "nonsense: 1": "nonsense",
    "nats: {url: 'nats://127.0.0.1:1'}": "triton.url: not set",
    "triton: {url: '127.0.0.1:1'}": "nats.url: is not set",
    "triton: {url: '127.0.0.1:1'}\nnats: {url: 'nats://127.0.0.1:1'}": (
        "start one or set nats.url"
    ),
}


def test_a_setup_error_is_one_line_and_not_exit_code_0(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.yaml" for number in range(len(WRONG))]
    for path, config in zip(paths, WRONG, strict=True):
        path.write_text(config, encoding="utf-8")
    ended = subprocess.run(
        (sys.executable, "-c", STARTS, *map(str, paths)), capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "1\n" * len(WRONG), ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("batcher: ")]
    for line, words in zip(lines, WRONG.values(), strict=True):
        assert words in line
    assert "Traceback" not in ended.stderr
