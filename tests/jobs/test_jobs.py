"""Jobs from end to end: every item once, whatever fails, is killed, paused or sent again."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import grpc
import nats
import pytest

from jobs.answers import DedupeCache, input_hash
from jobs.store import JobStore
from sluice import errors
from sluice.client.openai_lines import output_line
from sluice.settings import JobsSettings
from sluice.v1 import inference_pb2
from sluice.v1 import jobs_pb2 as pb
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Processes, lines

COMPLETED = pb.JOB_STATE_COMPLETED
PAUSED = pb.JOB_STATE_PAUSED


async def test_a_job_answers_every_item_once_and_in_order(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    sampling = inference_pb2.SamplingParams(max_tokens=7)
    job = await processes.create(lines(600), sampling=sampling, labels={"task": "sum"})

    job = await processes.ended(job.id)

    assert job.state == COMPLETED
    results = await processes.results(job.id)
    assert [one.custom_id for one in results] == [f"i{n}" for n in range(600)]
    assert [one.index for one in results] == list(range(600))
    assert all(one.answer.text == f"PROMPT {one.index}" for one in results)
    assert set(gateway.asked.values()) == {1}
    progress = job.report.progress
    assert (progress.total, progress.total_final, progress.succeeded) == (600, True, 600)
    assert (progress.prompt_tokens, progress.completion_tokens) == (1200, 1200)
    assert progress.cost == 300.0
    assert [one.index for one in await processes.results(job.id, 590)] == [*range(590, 600)]

    first, second, *_ = gateway.requests
    assert first.priority == inference_pb2.PRIORITY_BULK
    assert (first.model, first.sampling.max_tokens, first.labels["task"]) == ("echo", 7, "sum")
    assert first.idempotency_key_generated
    assert first.idempotency_key != second.idempotency_key
    assert gateway.tenants == {"default"}


async def test_a_process_that_is_killed_is_continued_where_its_log_is(
    processes: Processes, gateway: GatewayDouble
) -> None:
    first = await processes.start_real("one", window_items=64)
    answered = 0

    def plan(prompt: str, tries: int) -> errors.SluiceError | None:
        nonlocal answered
        answered += 1
        if answered == 400:
            gateway.hold.clear()
        return None

    gateway.plan = plan
    job = await processes.create(lines(1000))
    written = await processes.when(job.id, lambda one: one.progress.succeeded >= 256)
    await first.kill()
    gateway.hold.set()
    await processes.start("two", window_items=64)

    job = await processes.ended(job.id)

    assert (job.state, job.report.progress.succeeded) == (COMPLETED, 1000)
    results = await processes.results(job.id)
    assert [one.custom_id for one in results] == [f"i{n}" for n in range(1000)]
    again = sum(gateway.asked.values()) - 1000
    assert again <= 256 + 64, f"{again} computed again, {written.progress.succeeded} were written"


async def test_two_processes_never_both_write(processes: Processes, gateway: GatewayDouble) -> None:
    """A job that is resumed before its process has seen the pause is taken by another one as well."""
    await processes.start("one", window_items=64)
    await processes.start("two", window_items=64)
    answered = 200
    # The job must not end before the last pause; the process that has lost it may be far ahead of what is written.
    gateway.held = lambda prompt: int(prompt.rpartition(" ")[2]) >= answered
    gateway.hold.clear()
    job = await processes.create(lines(1500))
    for least in (1, 300, 600):
        await processes.when(job.id, lambda one, most=least: one.progress.succeeded >= most)  # type: ignore[misc]
        await processes.pause(job.id)
        await processes.resume(job.id)
        answered = least + 500 if least < 600 else 1500
        gateway.hold.set()  # for those that wait
        gateway.hold.clear()

    job = await processes.ended(job.id)

    assert (job.state, job.report.progress.succeeded) == (COMPLETED, 1500)
    assert [one.index for one in await processes.results(job.id)] == list(range(1500))


async def test_a_drained_process_leaves_its_job_to_another_one_at_once(
    processes: Processes, gateway: GatewayDouble
) -> None:
    first = await processes.start("one", window_items=32)
    job = await processes.create(lines(1000))
    await processes.when(job.id, lambda one: one.progress.succeeded > 0)
    await processes.start("two", window_items=32)
    await first.end()

    job = await processes.ended(job.id)

    assert (job.state, job.report.progress.succeeded) == (COMPLETED, 1000)
    assert sum(gateway.asked.values()) <= 1000 + 32


async def test_passing_errors_are_retried_permanent_ones_are_dead(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()

    def plan(prompt: str, tries: int) -> errors.SluiceError | None:
        match prompt:
            case "prompt 1" if tries < 3:
                return errors.EngineFailed("lost")
            case "prompt 2":
                return errors.PromptTooLong("9 tokens, the model takes 8")
            case "prompt 3":
                return errors.EngineFailed("always")
            case "prompt 4" if tries < 2:  # the waits double: core/test_window.py has more
                return errors.Overloaded("full", retry_after_s=0.001)
        return None

    gateway.plan = plan
    retries = pb.JobRetries(max_retries=2)
    retries.initial_backoff.FromMilliseconds(10)
    job = await processes.create(lines(6), retries=retries)
    job = await processes.when(job.id, lambda one: one.state == COMPLETED)

    results = await processes.results(job.id)
    assert [one.attempts for one in results] == [1, 3, 1, 3, 1, 1]
    dead = ["PROMPT_TOO_LONG", "ENGINE_FAILED"]
    assert [one.error.reason for one in results] == ["", "", *dead, "", ""]
    assert results[2].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    progress = job.report.progress
    assert (progress.succeeded, progress.retried, progress.dead) == (4, 1, 2)
    assert dict(job.report.dead_by_reason) == dict.fromkeys(dead, 1)
    assert [one.index for one in await processes.letters(job.id)] == [2, 3]


async def test_dead_letters_that_run_again_are_replaced(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    broken = True

    def plan(prompt: str, tries: int) -> errors.SluiceError | None:
        if prompt == "prompt 7":
            return errors.PromptTooLong("too long")
        return errors.SafetyBlocked("no") if broken and prompt.endswith("5") else None

    gateway.plan = plan
    job = await processes.create(lines(700) + b"nonsense\n")
    await processes.ended(job.id)
    broken = False
    assert await processes.retry(job.id) == 71
    job = await processes.ended(job.id)

    assert job.state == COMPLETED
    progress = job.report.progress
    assert (progress.total, progress.succeeded) == (701, 699)
    assert (progress.dead, progress.bad_lines) == (2, 1)
    assert dict(job.report.dead_by_reason) == {"PROMPT_TOO_LONG": 1, "BAD_LINE": 1}
    results = await processes.results(job.id)
    assert [one.index for one in results] == list(range(701))
    assert [one.index for one in results if one.HasField("error")] == [7, 700]
    assert (gateway.asked["prompt 5"], gateway.asked["prompt 6"]) == (2, 1)


async def test_identical_inputs_are_computed_once(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    data = lines(800, lambda n: f"prompt {n % 560}")
    job = await processes.ended((await processes.create(data)).id)
    reused = pb.JobDedupe(reuse_job_ids=[job.id])
    again = await processes.ended((await processes.create(data, dedupe=reused)).id)

    progress = job.report.progress
    assert sum(gateway.asked.values()) == 560
    assert (progress.succeeded, progress.deduplicated) == (800, 240)
    assert progress.saved_tokens == 240 * 4
    assert (progress.cost, progress.completion_tokens) == (280.0, 1120)
    results = await processes.results(job.id)
    assert all(one.answer.text == f"PROMPT {one.index % 560}" for one in results)
    assert again.report.progress.deduplicated == 800


@pytest.mark.parametrize(
    ("sampling", "shared"),
    [({}, True), ({"temperature": 1.0}, False), ({"temperature": 1.0, "seed": 3}, True)],
    ids=["greedy", "drawn", "seeded"],
)
def test_which_inputs_are_identical(sampling: dict[str, float], shared: bool) -> None:
    given = inference_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
    first, second = (
        input_hash(inference_pb2.GenerateRequest(prompt="x", sampling=given)) for _ in "12"
    )
    assert first == second
    assert bool(first) == shared
    other = input_hash(inference_pb2.GenerateRequest(prompt="y", sampling=given))
    assert (other != first) == shared


def test_hashes_of_inputs_stay_the_same() -> None:
    """Logs of earlier jobs have them."""
    request = inference_pb2.GenerateRequest(prompt="hello")
    assert input_hash(request).hex().startswith("eabaaab1f986")
    assert input_hash(inference_pb2.EmbedRequest(texts=["hello"])) != input_hash(request)


async def test_a_job_with_the_key_of_a_deleted_one_has_other_items(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    keys = []
    for word in ("old", "new"):
        job = await processes.create(lines(3, lambda n, word=word: f"{word} {n}"), key="nightly")  # type: ignore[misc]
        await processes.ended(job.id)
        keys.append({one.idempotency_key for one in gateway.requests})
        gateway.requests.clear()
        await processes.delete(job.id)

    assert len(keys[0]) == len(keys[1]) == 3
    assert not keys[0] & keys[1]


def _open_files() -> list[str]:
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the list
            found.append(os.readlink(one))
    return found


def test_answers_on_disk_have_no_name() -> None:
    """So nothing is left of them by a kill."""
    with DedupeCache() as cache:
        answer = pb.JobAnswer(text="x" * 100_000)
        for number in range(100):  # more than it keeps in memory
            cache.put(number.to_bytes(16, "big"), answer)
        files = [one for one in _open_files() if "etilqs_" in one]
        assert files
        assert all(one.endswith("(deleted)") for one in files)
        assert cache.get((7).to_bytes(16, "big")) == answer


async def test_a_job_is_paused_resumed_and_cancelled(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start(window_items=16)
    gateway.hold.clear()
    job = await processes.create(lines(100))
    await processes.when(job.id, lambda one: one.progress.in_flight == 16)

    paused = await processes.pause(job.id)
    assert (paused.state, paused.reason_code) == (PAUSED, "PAUSED_BY_CALLER")
    await processes.when(job.id, lambda one: one.runner == "")
    gateway.hold.set()
    await processes.resume(job.id)
    await processes.when(job.id, lambda one: one.state == COMPLETED)
    with pytest.raises(errors.WrongJobState, match="already completed"):
        await processes.cancel(job.id)
    assert len(await processes.results(job.id)) == 100


async def test_too_many_bad_lines_pause_the_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await processes.create(lines(40) + b"{\n" * 10)

    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (PAUSED, "TOO_MANY_BAD_LINES")
    assert "10 of the first 50 lines" in job.reason
    await processes.resume(job.id, max_bad_line_share=0.5)
    job = await processes.ended(job.id)

    assert (job.state, job.progress.bad_lines) == (COMPLETED, 10)
    letters = [one for one in await processes.results(job.id) if one.HasField("error")]
    assert [one.line for one in letters] == list(range(41, 51))


async def test_wrong_jobs_are_refused(processes: Processes, gateway: GatewayDouble) -> None:
    await processes.start()
    with pytest.raises(errors.JobUnknown):
        await processes.get("job-none")
    for upload in ("upload-none", "", "*"):
        with pytest.raises(errors.UploadUnknown):
            await processes.create(input=pb.JobInput(upload_id=upload))
    with pytest.raises(errors.InvalidRequest, match=r"spec\.input"):
        await processes.create(input=None)
    with pytest.raises(errors.UnknownModel, match="there are auto, echo"):
        await processes.create(lines(1), model="huge")


async def test_input_that_is_none_fails_the_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    job = await processes.ended((await processes.create(b"")).id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_FAILED, "INPUT_INVALID")


async def test_an_upload_that_no_job_uses_is_deleted(
    nats_url: str, processes: Processes, gateway: GatewayDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    await processes.start("one")
    job = await processes.create(lines(2))
    unused = await processes.upload(lines(2))
    await processes.ended(job.id)
    client = await nats.connect(nats_url)
    store = JobStore(JobsSettings(), 1)
    await store.start(client)
    monkeypatch.setattr("jobs.scheduler.UNUSED_UPLOAD_MS", -1000)
    await processes.start("two")

    async with asyncio.timeout(BOUND_S):
        while True:
            kept = {upload async for upload, _ in store.uploads()}
            if unused not in kept:
                break
            await asyncio.sleep(0.02)
    await client.close()

    assert kept == {job.spec.input.upload_id}


async def test_dead_letters_without_their_upload_are_refused(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.plan = lambda prompt, tries: errors.PromptTooLong("too long")
    job = await processes.ended((await processes.create(lines(1))).id)
    await processes.ask("DeleteUpload", pb.DeleteUploadRequest(upload_id=job.spec.input.upload_id))

    with pytest.raises(errors.UploadUnknown):
        await processes.retry(job.id)
    assert await processes.ended(job.id) == job


async def test_items_may_ask_for_embeddings(processes: Processes, gateway: GatewayDouble) -> None:
    await processes.start()
    url = "/v1/embeddings"
    bodies = [{"input": "one"}, {"input": ["a", "three"]}, {"input": "one"}]
    items = [
        {"custom_id": f"e{n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    job = await processes.create(b"".join(json.dumps(item).encode() + b"\n" for item in items))
    job = await processes.ended(job.id)
    assert (job.state, job.progress.succeeded, job.progress.deduplicated) == (COMPLETED, 3, 1)
    assert gateway.asked == {"one": 1, "a": 1}  # identical items are computed once
    written = [output_line(job.id, one) for one in await processes.results(job.id)]
    found = [
        [each["embedding"] for each in line["response"]["body"]["data"]]
        for line in written
        if line["response"]
    ]
    assert found == [[[3.0]], [[1.0], [5.0]], [[3.0]]]
    assert written[0]["response"]["body"]["usage"]["prompt_tokens"] == 1
