"""Jobs whose input lies at a URL, and jobs with a webhook, by real processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import InvalidRequest
from sluice.v1 import jobs_pb2 as pb
from tests.jobs.conftest import Receiver
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import BOUND_S, Processes, lines

SECRET = "a secret of enough characters"


async def test_an_input_at_a_listed_url_is_read_once(processes: Processes, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,text\n" + "".join(f"i{n},word {n}\n" for n in range(500)))
    prefix = f"file://{tmp_path}"
    await processes.start(input_prefixes=[prefix])
    given = pb.JobInput(url=f"{prefix}/in.csv", template="say {text}")

    job = await processes.ended((await processes.create(input=given)).id)

    assert job.state == pb.JOB_STATE_COMPLETED, job.reason
    results = await processes.results(job.id)
    assert [one.custom_id for one in results] == [f"i{n}" for n in range(500)]
    assert results[7].answer.text == "SAY WORD 7"


async def test_an_input_that_cannot_be_read_pauses_its_job(
    processes: Processes, tmp_path: Path
) -> None:
    prefix = f"file://{tmp_path}"
    await processes.start(input_prefixes=[prefix])
    job = await processes.create(input=pb.JobInput(url=f"{prefix}/in.jsonl"))
    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "INPUT_UNREADABLE")
    assert job.reason.endswith("then resume the job")

    (tmp_path / "in.jsonl").write_bytes(lines(3))
    await processes.resume(job.id)

    assert (await processes.ended(job.id)).state == pb.JOB_STATE_COMPLETED


async def test_input_that_is_cut_is_read_again_and_the_wait_is_shown(
    processes: Processes, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    base = f"http://127.0.0.1:{receiver.port}"
    receiver.body, receiver.cuts = lines(50), [1000, 1000]
    await processes.start(input_prefixes=[base], private_hosts=["127.0.0.1"])
    job = await processes.create(input=pb.JobInput(url=f"{base}/in.jsonl"))
    job = await processes.when(job.id, lambda one: bool(one.reason))
    assert job.state == pb.JOB_STATE_RUNNING
    assert job.reason.startswith("waiting: 127.0.0.1")
    assert "ended after 1000 of" in job.reason

    job = await processes.ended(job.id)

    assert (job.state, job.progress.total, job.reason) == (pb.JOB_STATE_COMPLETED, 50, "")
    assert sum("is waiting: 127.0.0.1" in one.message for one in caplog.records) == 1


@pytest.mark.long
async def test_input_that_stays_unreachable_pauses_its_job(processes: Processes) -> None:
    base = "http://127.0.0.1:9"
    await processes.start(input_prefixes=[base], private_hosts=["127.0.0.1"])
    job = await processes.create(input=pb.JobInput(url=f"{base}/in.jsonl"))

    job = await processes.ended(job.id)

    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "INPUT_UNREACHABLE")
    assert "refused" in job.reason
    assert "then resume the job" in job.reason


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"input": pb.JobInput(url="s3://bucket/in.jsonl")}, "jobs.input_prefixes"),
        (
            {
                "input": pb.JobInput(url="file:///data/a"),
                "webhook": pb.JobWebhook(url="https://127.0.0.1/", secret=SECRET),
            },
            "private",
        ),
        ({"input": pb.JobInput(nats_subject="a.b")}, "jobs.input_streams"),
        ({"input": pb.JobInput(nats_subject="a..b")}, "not a NATS subject"),
        ({"input": pb.JobInput(nats_subject="lost.a")}, "no stream LOST"),
        (
            {"input": pb.JobInput(nats_subject="lost.a", format=pb.JOB_INPUT_FORMAT_CSV)},
            "use a JSON format",
        ),
    ],
)
async def test_what_may_not_be_reached_is_told_when_the_job_is_created(
    processes: Processes, spec: dict[str, Any], said: str
) -> None:
    await processes.start(input_prefixes=["file:///data"], input_streams={"LOST": ["lost.>"]})
    with pytest.raises(InvalidRequest, match=said):
        await processes.create(**spec)


async def events(receiver: Receiver, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(BOUND_S):
        while len(receiver.got) < count:  # noqa: ASYNC110 - the server is a thread
            await asyncio.sleep(0.02)
    return [json.loads(body) for _, body in receiver.got]


async def test_the_end_of_a_job_is_told_once_by_one_of_two_processes(
    processes: Processes, gateway: GatewayDouble, receiver: Receiver
) -> None:
    await processes.start("one", private_hosts=["127.0.0.1"])
    await processes.start("two", private_hosts=["127.0.0.1"])
    hook = pb.JobWebhook(url=receiver.url, secret=SECRET)
    first = await processes.create(lines(20), webhook=hook)
    await processes.ended(first.id)
    (event,) = await events(receiver, 1)
    assert (event["type"], event["data"]["id"]) == ("batch.completed", first.id)
    assert event["data"]["succeeded"] == 20

    gateway.hold.clear()
    second = await processes.create(lines(20), webhook=hook)
    await processes.cancel(second.id)

    told = await events(receiver, 2)
    assert told[1]["type"] == "batch.cancelled"
    assert len({event["id"] for event in told}) == 2
    gateway.hold.set()
    shown = await processes.get(first.id)
    assert shown.spec.webhook.secret == ""


async def test_a_webhook_that_is_not_received_is_sent_again(
    processes: Processes, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.scheduler.SCAN_S", 3600.0)  # the end is told at once
    monkeypatch.setattr("jobs.webhooks.WAITS_S", (0.01,))
    receiver.statuses += [503]
    await processes.start(private_hosts=["127.0.0.1"])
    hook = pb.JobWebhook(url=receiver.url, secret=SECRET)
    await processes.create(lines(1), webhook=hook)
    first, second = await events(receiver, 2)
    assert first == second
