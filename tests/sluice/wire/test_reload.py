"""A process reads its configuration again on SIGHUP, and answers who asks for it over NATS."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from sluice.internal.v1.control_pb2 import ReloadAnswer, ReloadQuestion
from sluice.settings import Settings, SettingsError
from sluice.wire import subjects
from sluice.wire.codec import pack
from sluice.wire.reload import reloading, request_reload

LIMIT_S = 60


@pytest.fixture(autouse=True)
def _ignored_hangup() -> None:
    """What processes that reload do."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.fixture
async def nats_client(nats_url: str) -> AsyncIterator[Client]:
    client = await nats.connect(nats_url)
    yield client
    await client.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sluice.yaml"
    path.write_text("batcher: {drain_s: 8}\n")
    return path


class Applied:
    """Takes settings; refuses a ``drain_s`` of 13."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[float] = asyncio.Queue()
        self.go_on = asyncio.Semaphore(1000)
        self.running = 0

    async def __call__(self, settings: Settings) -> None:
        self.running += 1
        assert self.running == 1, "one at a time"
        self.begun.put_nowait(settings.batcher.drain_s)
        await self.go_on.acquire()
        self.running -= 1
        if settings.batcher.drain_s == 13:
            raise SettingsError("batcher.drain_s: cannot be changed while running")
        assert settings.batcher.drain_s != 14, "a fault of ours"


async def ask(client: Client, config: Path) -> ReloadAnswer | None:
    return await request_reload(client, os.getpid(), config, lambda: True, LIMIT_S)


async def test_a_hangup_applies_the_file_as_it_is_now(config: Path, nats_client: Client) -> None:
    applied = Applied()
    async with reloading(config, applied, nats_client):
        hang_up_with(config, "batcher: {drain_s: 9}\n")
        async with asyncio.timeout(LIMIT_S):
            assert await applied.begun.get() == 9


async def test_who_asks_hears_that_it_is_in_force(config: Path, nats_client: Client) -> None:
    applied = Applied()
    async with reloading(config, applied, nats_client):
        write(config, "batcher: {drain_s: 9}\n")
        answer = await ask(nats_client, config)

    assert answer == ReloadAnswer(taken=True)
    assert applied.begun.get_nowait() == 9
    assert applied.begun.empty()


@pytest.mark.parametrize(
    ("drain_s", "problem"),
    [
        ("none", "batcher.drain_s"),
        ("13", "batcher.drain_s: cannot be changed while running"),
        ("14", "internal error: AssertionError"),
    ],
)
async def test_who_asks_hears_why_not(
    config: Path, nats_client: Client, drain_s: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reloading(config, Applied(), nats_client):
        write(config, f"batcher: {{drain_s: {drain_s}}}\n")
        answer = await ask(nats_client, config)

    assert answer is not None
    assert not answer.taken
    assert problem in answer.problem
    assert "the configuration stays in force" in caplog.text


async def test_reloads_are_made_one_at_a_time(config: Path, nats_client: Client) -> None:
    applied = Applied()
    applied.go_on = asyncio.Semaphore(0)
    async with reloading(config, applied, nats_client), asyncio.timeout(LIMIT_S):
        hang_up_with(config, "batcher: {drain_s: 9}\n")
        assert await applied.begun.get() == 9
        for drain_s in (10, 11):
            hang_up_with(config, f"batcher: {{drain_s: {drain_s}}}\n")
        applied.go_on.release()
        assert await applied.begun.get() == 11
        applied.go_on.release()


async def test_a_question_that_comes_again_has_one_reload(
    config: Path, nats_client: Client
) -> None:
    applied = Applied()
    applied.go_on = asyncio.Semaphore(0)
    question = ReloadQuestion(id="one", pid=os.getpid(), path=str(config))
    answers = await nats_client.subscribe(subjects.reloaded("one"))
    async with reloading(config, applied, nats_client), asyncio.timeout(LIMIT_S):
        for _ in range(3):
            await nats_client.publish(subjects.RELOAD, pack(question))
        await nats_client.flush()
        await asyncio.sleep(0.1)
        applied.go_on.release()
        await answers.next_msg(LIMIT_S)

    assert applied.begun.qsize() == 1


@pytest.mark.parametrize("wrong", ["pid", "path", "id", "bytes"])
async def test_a_question_for_somebody_else_is_not_answered(
    config: Path, nats_client: Client, wrong: str
) -> None:
    applied = Applied()
    question = ReloadQuestion(id="one", pid=os.getpid(), path=str(config))
    if wrong == "pid":
        question.pid += 1
    elif wrong == "path":
        question.path += "x"
    elif wrong == "id":
        question.id = "a.>"
    async with reloading(config, applied, nats_client):
        await nats_client.publish(subjects.RELOAD, b"\xff" if wrong == "bytes" else pack(question))
        # What comes after it is answered, so it was seen.
        assert await ask(nats_client, config) == ReloadAnswer(taken=True)

    assert applied.begun.qsize() == 1


async def test_who_asks_a_process_that_ends_is_told(config: Path, nats_client: Client) -> None:
    looks = iter([True, False])
    gone = await request_reload(
        nats_client, os.getpid(), config, lambda: next(looks), bound_s=LIMIT_S
    )
    assert gone is None


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
async def test_reloading_leaves_hangup_as_it_was(
    config: Path, nats_client: Client, before: signal.Handlers
) -> None:
    signal.signal(signal.SIGHUP, before)
    async with reloading(config, Applied(), nats_client):
        pass
    assert signal.getsignal(signal.SIGHUP) is before


def write(config: Path, text: str) -> None:
    config.write_text(text)


def hang_up_with(config: Path, text: str) -> None:
    write(config, text)
    os.kill(os.getpid(), signal.SIGHUP)
