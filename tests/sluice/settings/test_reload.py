"""SIGHUP reads the configuration again."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.settings import Settings, SettingsError, load
from sluice.settings.reload import outcome_in, refuse_changes, reloading


@pytest.fixture(autouse=True)
def _default_hangup() -> Iterator[None]:
    yield
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sluice.yaml"
    path.write_text("batcher: {stall_s: 8}\n")
    return path


async def test_a_hangup_applies_the_file_as_it_is_now(config: Path) -> None:
    seen: asyncio.Queue[Settings] = asyncio.Queue()
    with reloading(config, seen.put_nowait):
        _hang_up_with(config, "batcher: {stall_s: 9}\n")
        async with asyncio.timeout(60):
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
    logging.getLogger("sluice.settings.reload").addHandler(watch)
    try:
        with reloading(config, apply):
            _hang_up_with(config, f"batcher: {{stall_s: {'none' if fault == 'file' else 9}}}\n")
            async with asyncio.timeout(60):
                await logged.wait()
    finally:
        logging.getLogger("sluice.settings.reload").removeHandler(watch)
    assert "the configuration stays as it was" in caplog.text
    assert "batcher.stall_s" in caplog.text


async def test_what_takes_long_is_awaited_one_at_a_time(config: Path) -> None:
    begun: asyncio.Queue[int] = asyncio.Queue()
    go_on = asyncio.Semaphore(0)
    running = 0

    async def apply(settings: Settings) -> None:
        nonlocal running
        running += 1
        assert running == 1, "one at a time"
        begun.put_nowait(settings.batcher.prefetch_rows)
        await go_on.acquire()
        running -= 1

    with reloading(config, apply):
        async with asyncio.timeout(60):
            _hang_up_with(config, "batcher: {prefetch_rows: 9}\n")
            assert await begun.get() == 9
            for rows in (10, 11):
                _hang_up_with(config, f"batcher: {{prefetch_rows: {rows}}}\n")
            go_on.release()
            assert await begun.get() == 11
            go_on.release()


async def test_after_the_block_a_hangup_does_nothing(config: Path) -> None:
    with reloading(config, lambda settings: None):
        pass
    _hang_up_with(config, "")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("batcher: {prefetch_rows: 9}", "batcher.prefetch_rows"),
        ("routing: {rules: []}", "routing.rules"),
        ("models: [{name: small, path: x}, {name: large, path: y}]", "models.0.path"),
    ],
)
def test_the_key_that_cannot_change_is_named(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    fixed = [name for name in Settings.model_fields if name != "safety"]
    refuse_changes(Settings(), Settings(safety={"default": "x"}), fixed)
    with pytest.raises(SettingsError, match=rf"^{key}: cannot be changed while running"):
        refuse_changes(Settings(), load(path), fixed)


def test_the_outcome_is_read_from_a_log() -> None:
    stamp = "2026-01-01 10:00:00,000"
    said = [
        f"{stamp} INFO gateway.server gateway gw1 serves",
        f"{stamp} ERROR sluice.settings.reload the configuration stays as it was: x.yaml: line 3: no",
        f"{stamp} INFO sluice.settings.reload configuration read again: x.yaml",
    ]
    assert outcome_in(said[0]) is None
    assert outcome_in("\n".join(said)) == (False, "x.yaml: line 3: no")
    assert outcome_in("\n".join((said[0], said[2]))) == (True, "")


def _hang_up_with(config: Path, text: str) -> None:
    config.write_text(text)
    os.kill(os.getpid(), signal.SIGHUP)
