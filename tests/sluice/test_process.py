"""What every process of a mesh starts with."""

import signal
import sys
from pathlib import Path

import pytest

from sluice import interpreter
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
    assert found == [pytest.approx(interpreter.SWITCH_S)]
    assert interpreter.SWITCH_S <= 0.001


@pytest.mark.parametrize("reloads", [False, True])
def test_hangup_is_ignored_where_it_reloads(tmp_path: Path, reloads: bool) -> None:
    config, found = tmp_path / "config.yaml", list[object]()
    config.write_text("nats: {url: 'nats://127.0.0.1:1'}\n")

    async def serve(_: Process) -> None:
        found.append(signal.getsignal(signal.SIGHUP))

    before = sys.getswitchinterval()
    try:
        Program("batcher", "", "b", serve, reloads=reloads).main(["--config", str(config)])
    finally:
        sys.setswitchinterval(before)
    assert found == [signal.SIG_IGN if reloads else signal.SIG_DFL]
