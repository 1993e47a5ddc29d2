"""Jobs that are paused, cancelled, expired or failed: what was computed can be read, and everything is counted."""

import asyncio
from typing import Any

import pytest

from sluice import errors
from sluice.client.openai_lines import encoded_line
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import timestamp, unix_ms
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Processes, lines
from tests.jobs.test_stages import MAP, REDUCE, documents, words

COUNT = 30


async def closed(processes: Processes, job: str) -> pb.Job:
    """The job when it is over and its counts are final."""
    return await processes.when(job, lambda one: one.HasField("end_time") and not one.closing)


async def cancel(processes: Processes, job: str) -> pb.Job:
    await processes.cancel(job)
    return await closed(processes, job)


async def behind_a_gap(
    processes: Processes, gateway: GatewayDouble, count: int = COUNT, **spec: Any
) -> pb.Job:
    """A job of which all but the first item have an answer."""
    gateway.held = lambda prompt: prompt == "prompt 0"
    gateway.hold.clear()
    job = await processes.create(lines(count), **spec)
    return await processes.when(job.id, lambda one: one.progress.succeeded == count - 1)


async def check_counts(processes: Processes, job: pb.Job) -> list[pb.JobResult]:
    """Check that results, dead letters, progress and report agree; the dead letters."""
    answered = [one for one in await processes.results(job.id) if one.HasField("answer")]
    dead = await processes.letters(job.id)
    progress = job.progress
    assert (len(answered), len(dead)) == (progress.succeeded, progress.dead)
    indexes = sorted(one.index for one in (*answered, *dead))
    assert indexes == list(range(progress.total))
    assert [one.index for one in answered] == sorted(one.index for one in answered)
    assert (progress.total_final, progress.in_flight) == (True, 0)
    assert not progress.HasField("remaining")
    assert progress.output_bytes == sum(len(encoded_line(job.id, one)) for one in answered)
    assert progress.error_bytes == sum(len(encoded_line(job.id, one)) for one in dead)
    assert job.report.progress == progress
    assert sum(job.report.dead_by_reason.values()) == progress.dead
    return dead


async def test_cancelled_job_keeps_answers_behind_a_gap(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await behind_a_gap(processes, gateway)

    job = await cancel(processes, job.id)

    assert (job.state, job.progress.succeeded) == (pb.JOB_STATE_CANCELLED, COUNT - 1)
    (left,) = await check_counts(processes, job)
    assert (left.custom_id, left.line, left.error.reason) == ("i0", 1, "batch_cancelled")
    assert await processes.letters(job.id, 1) == []
    assert [one.index for one in await processes.results(job.id, 28)] == [28, 29]


async def test_cancelled_job_counts_input_not_read_yet(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start(window_items=16)
    gateway.held = lambda prompt: int(prompt.rpartition(" ")[2]) >= 100
    gateway.hold.clear()
    job = await processes.create(lines(3000) + b"nonsense\n")
    await processes.when(job.id, lambda one: one.progress.succeeded >= 80)

    job = await cancel(processes, job.id)

    assert job.progress.total == 3001
    *others, last = await check_counts(processes, job)
    assert {one.error.reason for one in others} == {"batch_cancelled"}
    assert (last.line, last.error.reason, job.progress.bad_lines) == (3001, "BAD_LINE", 1)


async def test_expired_job_says_so_of_each_other_item(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    limits = pb.JobLimits(deadline_time=timestamp(unix_ms() + 2500))
    job = await behind_a_gap(processes, gateway, limits=limits)

    job = await closed(processes, job.id)

    assert (job.state, job.progress.succeeded) == (pb.JOB_STATE_EXPIRED, COUNT - 1)
    assert [one.error.reason for one in await check_counts(processes, job)] == ["batch_expired"]


async def test_failed_job_keeps_answers(processes: Processes, gateway: GatewayDouble) -> None:
    await processes.start()
    gateway.held = lambda prompt: prompt == "prompt 0"
    gateway.hold.clear()
    job = await processes.create(lines(2000) + b"\n" * 1001 + lines(1))

    job = await closed(processes, job.id)

    assert (job.state, job.reason_code) == (pb.JOB_STATE_FAILED, "INPUT_INVALID")
    assert (job.progress.total, job.progress.succeeded > 0) == (2000, True)
    dead = await check_counts(processes, job)
    assert {one.error.reason for one in dead} == {"INPUT_INVALID"}


async def test_paused_job_shows_answers_and_continues(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await behind_a_gap(processes, gateway)
    await processes.pause(job.id)
    job = await processes.when(job.id, lambda one: not one.runner)

    assert [one.index for one in await processes.results(job.id)] == list(range(1, COUNT))
    assert await processes.letters(job.id) == []
    assert (job.progress.in_flight, job.progress.HasField("remaining")) == (0, False)

    gateway.hold.set()
    await processes.resume(job.id)
    assert (await processes.ended(job.id)).state == pb.JOB_STATE_COMPLETED
    assert len(await processes.results(job.id)) == COUNT


async def test_job_cancelled_while_it_waits_has_its_whole_input(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.hold.clear()
    job = await processes.create(lines(COUNT))
    await processes.pause(job.id)
    await processes.when(job.id, lambda one: not one.runner)

    job = await cancel(processes, job.id)

    assert len(await check_counts(processes, job)) == COUNT


async def test_retry_runs_items_that_were_cancelled(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.plan = lambda prompt, tries: (
        errors.PromptTooLong("too long") if prompt == "prompt 7" and tries == 1 else None
    )
    gateway.held = lambda prompt: prompt in ("prompt 0", "prompt 3")
    gateway.hold.clear()
    job = await processes.create(lines(COUNT) + b"nonsense\n")
    await processes.when(job.id, lambda one: one.progress.succeeded == COUNT - 3)
    job = await cancel(processes, job.id)
    assert dict(job.report.dead_by_reason) == {
        "BAD_LINE": 1,
        "PROMPT_TOO_LONG": 1,
        "batch_cancelled": 2,
    }
    # The second round is cancelled too, with one of its three items.
    gateway.held = lambda prompt: prompt == "prompt 3"
    gateway.hold.set()
    gateway.hold.clear()
    assert await processes.retry(job.id) == 3
    await processes.when(job.id, lambda one: one.progress.succeeded == COUNT - 1)
    job = await cancel(processes, job.id)
    dead = await check_counts(processes, job)
    assert [one.error.reason for one in dead] == ["batch_cancelled", "BAD_LINE"]

    gateway.hold.set()
    assert await processes.retry(job.id, "batch_cancelled") == 1
    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED
    assert [one.error.reason for one in await check_counts(processes, job)] == ["BAD_LINE"]


async def test_cancelled_stage_is_the_one_that_is_read(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.held = lambda prompt: prompt == "MAP w0 w1 w2 w3"
    gateway.hold.clear()
    job = await processes.create(documents(words(10), "one two"), stages=[MAP, REDUCE])
    await processes.when(job.id, lambda one: one.progress.succeeded == 3)

    job = await cancel(processes, job.id)

    (left,) = await check_counts(processes, job)
    assert (left.custom_id, left.part, left.parts) == ("d0", 0, 3)
    shown = [(one.total, one.succeeded, one.dead) for one in job.progress.stages]
    assert shown == [(4, 3, 1)]


async def test_followed_results_of_a_cancelled_job_are_whole(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await behind_a_gap(processes, gateway)
    request = pb.GetResultsRequest(id=job.id, follow=True)
    following = asyncio.create_task(processes.ask("GetResults", request))
    await cancel(processes, job.id)
    assert [one.index for page in await following for one in page.results] == [*range(1, COUNT)]


async def test_followed_results_do_not_wait_for_the_next(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.held = lambda prompt: prompt == f"prompt {COUNT - 1}"
    gateway.hold.clear()
    job = await processes.create(lines(COUNT))
    await processes.when(job.id, lambda one: one.progress.succeeded == COUNT - 1)
    following = processes.stub.GetResults(pb.GetResultsRequest(id=job.id, follow=True))
    count = 0
    async with asyncio.timeout(BOUND_S):
        while count < COUNT - 1:
            count += len((await following.read()).results)
    gateway.hold.set()
    assert [one.index for one in (await following.read()).results] == [COUNT - 1]


@pytest.mark.long
async def test_cancelled_job_of_a_lost_process_is_closed(
    processes: Processes, gateway: GatewayDouble
) -> None:
    lost = await processes.start_real("one")
    job = await behind_a_gap(processes, gateway)
    await processes.start("two")
    await lost.kill()

    job = await cancel(processes, job.id)

    assert (job.progress.succeeded, job.runner) == (COUNT - 1, "")
    await check_counts(processes, job)


async def test_model_that_a_reload_removes_pauses_the_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start(window_items=4)
    removed = False

    def plan(prompt: str, tries: int) -> errors.SluiceError | None:
        nonlocal removed
        removed = removed or prompt == "prompt 20"
        return errors.UnknownModel("no model 'echo'") if removed else None

    gateway.plan = plan
    job = await processes.create(lines(100))
    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "MODEL_UNKNOWN")
    assert "model echo is no longer served" in job.reason
    assert (job.progress.dead, job.progress.succeeded > 0) == (0, True)

    gateway.plan = lambda prompt, tries: None
    await processes.resume(job.id)
    job = await processes.ended(job.id)
    assert (job.state, job.progress.succeeded) == (pb.JOB_STATE_COMPLETED, 100)


async def test_model_that_never_was_there_is_the_lines_fault(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.plan = lambda prompt, tries: (
        errors.UnknownModel("no model 'none'") if prompt == "x" else None
    )
    wrong = b'{"id": "wrong", "prompt": "x", "model": "none"}\n'
    job = await processes.create(lines(20) + wrong)
    job = await processes.ended(job.id)
    assert (job.state, job.progress.dead) == (pb.JOB_STATE_COMPLETED, 1)
