"""What ends, slows or pauses a job: its deadline, its rates, a full store, a NATS server that is killed."""

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice import errors
from sluice.startup import free_port
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of, timestamp, unix_ms
from supervisor.nats import NatsConfig, nats_command, wait_for_nats
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes, lines

MIB = 1024**2


async def test_a_job_past_its_deadline_expires_and_keeps_its_results(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start(window_items=4)
    gateway.plan = lambda prompt, tries: gateway.hold.clear() if prompt == "prompt 9" else None
    limits = pb.JobLimits(deadline_time=timestamp(unix_ms() + 2500))
    job = await processes.create(lines(20), limits=limits)
    job = await processes.ended(job.id)

    assert (job.state, job.reason_code) == (pb.JOB_STATE_EXPIRED, "DEADLINE_EXCEEDED")
    assert job.HasField("end_time")
    assert job.report.progress.succeeded == len(await processes.results(job.id)) >= 8
    with pytest.raises(errors.WrongJobState):
        await processes.resume(job.id)


@pytest.mark.parametrize(
    ("limits", "least_s"),
    [
        # 10 at once, then 10 a second: 5 more.
        (pb.JobLimits(requests_per_minute=600), 0.5),
        # 4 tokens an item; 20 at once, then 20 a second, each known when its item is answered: 60 less 20 and an item.
        (pb.JobLimits(tokens_per_minute=1200, concurrency=1), 1.8),
    ],
    ids=["requests", "tokens"],
)
async def test_a_rate_holds_from_end_to_end(
    processes: Processes, gateway: GatewayDouble, limits: pb.JobLimits, least_s: float
) -> None:
    asked: list[float] = []
    gateway.plan = lambda prompt, tries: asked.append(time.monotonic())
    await processes.start()
    job = await processes.create(lines(15), limits=limits)
    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED
    assert len(asked) == 15
    assert asked[-1] - asked[0] >= 0.9 * least_s


async def test_no_more_is_spent_than_the_job_may_cost(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await processes.create(lines(200), limits=pb.JobLimits(max_cost=5.0))
    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "MAX_COST_REACHED")
    assert (job.progress.cost, gateway.asked.total()) == (5.0, 10)

    await processes.resume(job.id, max_cost=50.0)
    job = await processes.ended(job.id)
    assert (job.progress.cost, job.reason_code) == (50.0, "MAX_COST_REACHED")


async def test_a_job_that_runs_may_be_let_cost_more(
    processes: Processes, gateway: GatewayDouble
) -> None:
    gateway.hold.clear()
    await processes.start()
    job = await processes.create(lines(20), limits=pb.JobLimits(max_cost=0.1))
    await processes.when(job.id, lambda one: one.progress.in_flight == 1)
    await processes.resume(job.id, max_cost=50.0)
    gateway.hold.set()

    assert (await processes.ended(job.id)).state == pb.JOB_STATE_COMPLETED


async def test_the_running_time_is_that_of_all_turns(
    processes: Processes, gateway: GatewayDouble
) -> None:
    """What a turn took counts also when its last write came too late: the call that paused it had written."""
    gateway.hold.clear()
    await processes.start()
    job = await processes.create(lines(2))
    ran_s = 0.0
    for _ in range(2):
        await processes.when(job.id, lambda one: one.progress.in_flight == 2)
        begun = time.monotonic()
        await processes.when(job.id, lambda one, begun=begun: time.monotonic() - begun > 0.7)  # type: ignore[misc]
        ran_s += time.monotonic() - begun
        await processes.pause(job.id)
        await processes.when(job.id, lambda one: not one.runner)
        await processes.resume(job.id)
    gateway.hold.set()
    job = await processes.ended(job.id)

    assert ms_of(job.report.running_time) / 1e3 >= ran_s


async def test_a_full_store_pauses_the_job_and_says_what_to_do(
    processes: Processes, gateway: GatewayDouble
) -> None:
    small = await processes.start("one", results_max_bytes=MIB)
    gateway.answer = lambda prompt: prompt + "x" * 50_000
    job = await processes.create(lines(60))
    job = await processes.ended(job.id)

    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "STORAGE_FULL")
    assert "raise jobs.results_max_bytes" in job.reason
    assert "resume the job" in job.reason
    written = len(await processes.results(job.id))
    assert 0 < written < 60
    assert job.progress.succeeded == written
    await small.end()
    await processes.start("two", results_max_bytes=8 * MIB)
    await processes.resume(job.id)
    job = await processes.when(job.id, lambda one: one.state == pb.JOB_STATE_COMPLETED)

    assert [one.index for one in await processes.results(job.id)] == list(range(60))
    assert job.progress.succeeded == 60


async def test_an_upload_that_is_too_large_for_the_store_is_refused(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start(inputs_max_bytes=MIB)
    with pytest.raises(errors.StorageFull, match=r"jobs\.inputs_max_bytes"):
        await processes.upload(lines(20_000, lambda n: "x" * 100))
    await processes.upload(lines(10))


class KilledNats:
    """A server that can be killed and started again with what it has stored."""

    def __init__(self, folder: Path) -> None:
        self.config = NatsConfig(free_port(), folder / "store")
        self._command = nats_command(self.config, folder / "nats.conf")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
async def killed_nats(tmp_path: Path) -> AsyncIterator[KilledNats]:
    nats = KilledNats(tmp_path)
    await wait_for_nats(nats.config.url, 30)
    yield nats
    nats.kill()


async def test_a_job_outlives_a_nats_server_that_is_killed(
    killed_nats: KilledNats, gateway: GatewayDouble, tmp_path: Path
) -> None:
    async with Processes(killed_nats.config.url, gateway.address, tmp_path) as processes:
        await processes.start(window_items=64)
        job = await processes.create(lines(1500))
        for least in (300, 900):
            await processes.when(job.id, lambda one, most=least: one.progress.succeeded >= most)  # type: ignore[misc]
            killed_nats.kill()
            killed_nats.start()
        job = await processes.ended(job.id)

        assert job.state == pb.JOB_STATE_COMPLETED, job.reason
        assert job.progress.succeeded == 1500
        assert [one.index for one in await processes.results(job.id)] == list(range(1500))
        assert sum(gateway.asked.values()) <= 1500 + 2 * (256 + 64)
