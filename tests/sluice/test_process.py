"""What every process of a mesh starts with."""

import sys
from pathlib import Path

import pytest

from sluice import startup
from sluice.process import Process, Program


def test_threads_give_way_to_the_event_loop_at_once(tmp_path: Path) -> None:
    config, found = tmp_path / "config.yaml", list[float]()
    config.write_text("nats: {url: 'nats://127.0.0.1:1'}\n")

    async def serve(_: Process) -> None:
        found.append(sys.getswitchinterval())

    before = sys.getswitchinterval()
    try:
        assert Program("batcher", "", "b", serve).main(["--config", str(config)]) == 0
    finally:
        sys.setswitchinterval(before)
    assert found == [pytest.approx(startup.SWITCH_S)]
    assert startup.SWITCH_S <= 0.001
