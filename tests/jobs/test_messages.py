"""Jobs whose items are the messages of a NATS subject, in a stream that is not ours."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from opentelemetry.trace import NoOpTracer

from jobs.gateways import GatewayClient
from jobs.items import Item
from jobs.process import JobProcess
from jobs.sources import MessageSource
from jobs.store import JobStore
from sluice import errors
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.settings import JobsSettings
from sluice.telemetry.instruments import Instruments
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes

STREAMS = {"PROMPTS": ["prompts.>"]}
SUBJECT = "prompts.nightly"


@pytest.fixture
async def stream(nats_url: str) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_url)
    made = client.jetstream()
    await made.add_stream(name="PROMPTS", subjects=["prompts.>"])
    yield made
    await client.close()


async def publish(stream: JetStreamContext, first: int, last: int, subject: str = SUBJECT) -> None:
    sent = [
        stream.publish(
            subject, json.dumps({"id": f"i{n}", "prompt": f"prompt {n}"}, indent=1).encode()
        )
        for n in range(first, last)
    ]
    for each in sent:  # in order
        await each


async def create(processes: Processes, **given: Any) -> pb.Job:
    return await processes.create(input=pb.JobInput(nats_subject=SUBJECT, **given))


async def test_each_message_is_an_item_until_an_empty_one(
    processes: Processes, gateway: GatewayDouble, stream: JetStreamContext
) -> None:
    await processes.start(input_streams=STREAMS)
    await publish(stream, 0, 40)
    await publish(stream, 900, 910, "prompts.other")
    job = await create(processes)
    await processes.when(job.id, lambda one: one.progress.succeeded == 40)
    await stream.publish(SUBJECT, b"{nonsense")
    await publish(stream, 40, 60)
    await stream.publish(SUBJECT, b"")
    await publish(stream, 60, 70)

    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED, job.reason
    results = await processes.results(job.id)
    expected = [f"i{n}" for n in range(40)] + [""] + [f"i{n}" for n in range(40, 60)]
    assert [one.custom_id for one in results] == expected
    assert [one.line for one in results] == list(range(1, 62))
    assert results[40].error.reason == "BAD_LINE"
    assert results[60].answer.text == "PROMPT 59"
    assert (job.progress.total, job.progress.total_final, job.nats_last_sequence) == (61, True, 72)
    state = (await stream.stream_info("PROMPTS")).state
    assert (state.messages, state.consumer_count) == (82, 0)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ({"nats_message_count": 7}, range(7)),
        ({"nats_message_count": 7, "nats_start_sequence": 5}, range(4, 11)),
        ({"nats_idle": duration(200)}, range(20)),
        ({"nats_idle": duration(200), "nats_start_sequence": 50}, range(0)),
    ],
)
async def test_an_input_ends_by_count_or_when_no_message_comes(
    processes: Processes,
    gateway: GatewayDouble,
    stream: JetStreamContext,
    given: dict[str, Any],
    ids: range,
) -> None:
    await processes.start(input_streams=STREAMS)
    await publish(stream, 0, 20)

    job = await processes.ended((await create(processes, **given)).id)

    assert job.state == pb.JOB_STATE_COMPLETED, job.reason
    results = await processes.results(job.id)
    assert [one.custom_id for one in results] == [f"i{n}" for n in ids]


async def test_a_kill_loses_and_doubles_no_message(
    processes: Processes, gateway: GatewayDouble, stream: JetStreamContext
) -> None:
    first = await processes.start_real("one", window_items=64, input_streams=STREAMS)
    answered = 0

    def plan(prompt: str, tries: int) -> errors.SluiceError | None:
        nonlocal answered
        answered += 1
        if answered == 700:
            gateway.hold.clear()
        return None

    gateway.plan = plan
    await publish(stream, 0, 1000)
    job = await create(processes, nats_message_count=1500)
    await processes.when(job.id, lambda one: one.progress.succeeded >= 500)
    await first.kill()
    gateway.plan = lambda prompt, tries: None  # the 700th may still be to come
    gateway.hold.set()
    await publish(stream, 1000, 1500)
    await stream.purge_stream("PROMPTS", seq=301)  # the stream may forget what was copied
    await processes.start("two", window_items=64, input_streams=STREAMS)

    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED, job.reason
    assert [one.custom_id for one in await processes.results(job.id)] == [
        f"i{n}" for n in range(1500)
    ]
    assert sum(gateway.asked.values()) <= 1500 + 256 + 64


async def test_two_processes_that_read_for_a_job_read_the_same(
    nats_url: str, stream: JetStreamContext
) -> None:
    await publish(stream, 0, 600)
    client = await nats.connect(nats_url)
    store, gateways = JobStore(JobsSettings(), 1), GatewayClient("127.0.0.1:1")
    await store.start(client)
    settings = JobsSettings(input_streams=STREAMS)
    process = JobProcess("me", settings, store, gateways, NoOpTracer(), Instruments())
    given = pb.JobInput(nats_subject=SUBJECT, nats_message_count=1200)
    record = JobRecord(upload_id="upload-a", job=pb.Job(id="job-a", spec=pb.JobSpec(input=given)))

    async def read() -> list[str]:
        source = MessageSource(process, record)
        return [
            one.custom_id
            async for block in source.blocks()
            for one in block
            if isinstance(one, Item)
        ]

    reading = [asyncio.ensure_future(read()) for _ in range(2)]
    await publish(stream, 600, 1200)
    found = await asyncio.gather(*reading)
    await gateways.close()
    await client.close()

    assert found == [[f"i{n}" for n in range(1200)]] * 2


async def test_a_stream_that_is_gone_pauses_the_job(
    processes: Processes, gateway: GatewayDouble, stream: JetStreamContext
) -> None:
    await processes.start(input_streams=STREAMS)
    job = await create(processes, nats_message_count=3)
    await processes.when(job.id, lambda one: one.state == pb.JOB_STATE_RUNNING)
    await stream.delete_stream("PROMPTS")

    job = await processes.ended(job.id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "INPUT_UNREADABLE")
    assert "no stream PROMPTS" in job.reason
    await stream.add_stream(name="PROMPTS", subjects=["prompts.>"])
    await publish(stream, 0, 3)
    await processes.resume(job.id)

    assert (await processes.ended(job.id)).progress.succeeded == 3


async def test_messages_count_as_inputs_of_their_tenant(
    processes: Processes, gateway: GatewayDouble, stream: JetStreamContext
) -> None:
    await processes.start(input_streams=STREAMS, inputs_max_bytes=2 << 20)
    for number in range(6):
        line = json.dumps({"id": f"i{number}", "prompt": "x" * 400_000})
        await stream.publish(SUBJECT, line.encode())
    job = await processes.ended((await create(processes, nats_message_count=6)).id)
    assert (job.state, job.reason_code) == (pb.JOB_STATE_PAUSED, "STORAGE_FULL")
    assert "the inputs of the tenant" in job.reason
