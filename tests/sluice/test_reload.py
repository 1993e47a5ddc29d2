"""SIGHUP reads the configuration again."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from sluice.reload import reloading
from sluice.settings import Settings, SettingsError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sluice.yaml"
    path.write_text("batcher: {stall_s: 8}\n")
    return path


async def test_a_hangup_applies_the_file_as_it_is_now(config: Path) -> None:
    seen: asyncio.Queue[Settings] = asyncio.Queue()
    with reloading(config, seen.put_nowait):
        _hang_up_with(config, "batcher: {stall_s: 9}\n")
        async with asyncio.timeout(5):
            assert (await seen.get()).batcher.stall_s == 9


@pytest.mark.parametrize("fault", ["file", "apply"])
async def test_what_cannot_work_is_logged_and_nothing_else(
    config: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    logged = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    def apply(settings: Settings) -> None:
        assert fault == "apply", "a broken file is not applied"
        raise SettingsError("batcher.stall_s: cannot be changed while running")

    watch = Watch()
    logging.getLogger("sluice.reload").addHandler(watch)
    try:
        with reloading(config, apply):
            _hang_up_with(config, f"batcher: {{stall_s: {'none' if fault == 'file' else 9}}}\n")
            async with asyncio.timeout(5):
                await logged.wait()
    finally:
        logging.getLogger("sluice.reload").removeHandler(watch)
    assert "the configuration stays as it was" in caplog.text
    assert "batcher.stall_s" in caplog.text


def _hang_up_with(config: Path, text: str) -> None:
    config.write_text(text)
    os.kill(os.getpid(), signal.SIGHUP)
