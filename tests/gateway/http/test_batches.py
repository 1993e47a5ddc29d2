"""Files and batches over HTTP, as OpenAI's own client uses them: a real process of jobs, the test as batcher."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from gateway.admission.arrivals import UPLOADS_MAX
from gateway.api.job_forwarder import JobForwarder
from sluice.settings import JobsSettings, NatsSettings, Settings
from sluice.startup import free_port
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.jobs_pb2_grpc import JobServiceStub
from tests.gateway.kit.batcher import BOUND_S, last
from tests.gateway.kit.http import Connection, ask
from tests.gateway.kit.wire import Wire, open_wire
from tests.jobs.processes import Process

CHAT: Any = "/v1/chat/completions"


def line(name: str, text: str, model: str = "small") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


async def test_a_batch_from_its_file_to_its_results(
    nats_url: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", jobs=address) as wire:
        jobs = JobsSettings(address=address, gateways=wire.gateway.address)
        process = Process(Settings(nats=NatsSettings(url=nats_url), jobs=jobs), "jobs")
        async with (
            grpc.aio.insecure_channel(address) as channel,
            AsyncOpenAI(base_url=f"http://{wire.http}/v1", api_key="none", timeout=60) as client,
        ):
            await asyncio.wait_for(channel.channel_ready(), BOUND_S)
            try:
                await _run_batch(wire, client, monkeypatch)
            finally:
                await process.end()


async def _run_batch(wire: Wire, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line("a", "hello"), line("b", "hello", "none"), line("c", "how are you")]
    data = "".join(json.dumps(one) + "\n" for one in lines).encode() + b"no JSON\n"
    stored = await client.files.create(
        file=("in.jsonl", data),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert stored.expires_at is not None
    assert 3500 < stored.expires_at - stored.created_at <= 3601
    assert (stored.bytes, stored.filename, stored.purpose) == (len(data), "in.jsonl", "batch")
    assert (await client.files.retrieve(stored.id)).bytes == len(data)

    batch = await client.batches.create(
        input_file_id=stored.id, endpoint=CHAT, completion_window="24h", metadata={"team": "x"}
    )
    assert batch.status in ("validating", "in_progress")
    assert (batch.metadata, batch.input_file_id) == ({"team": "x"}, stored.id)
    for _ in range(2):
        task = await wire.batcher.task(priority_class="bulk")
        await wire.batcher.send(task, last(0, wire.tokens("world")))
    watching: Any = JobServiceStub(wire.channel).WatchJob(
        pb.WatchJobRequest(id=batch.id.removeprefix("batch_"))
    )
    async with asyncio.timeout(BOUND_S):
        async for _ in watching:
            pass

    done = await client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 2)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    output = await client.files.content(done.output_file_id)
    for name in (done.output_file_id, done.error_file_id):
        content = (await client.files.content(name)).content
        assert (await client.files.retrieve(name)).bytes == len(content)
    answers = [json.loads(one) for one in output.text.splitlines()]
    assert [one["custom_id"] for one in answers] == ["a", "c"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "world"
    letters = (await client.files.content(done.error_file_id)).text.splitlines()
    await _list_files(client, stored.id, done)
    failed, bad = [json.loads(one) for one in letters]
    assert (bad["response"], bad["error"]["code"]) == (None, "BAD_LINE")
    assert failed["custom_id"] == "b"
    assert failed["response"]["status_code"] == 404
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"

    another = await client.batches.create(
        input_file_id=stored.id, endpoint=CHAT, completion_window="1h"
    )
    await wire.batcher.task(priority_class="bulk")
    with pytest.raises(sdk.NotFoundError, match="has not ended"):
        await client.files.content(f"file-{another.id.removeprefix('batch_')}-output")
    with pytest.raises(sdk.BadRequestError, match=r"reads this upload; cancel it") as in_use:
        await client.files.delete(stored.id)
    assert in_use.value.code == "job_state_wrong"
    assert (await client.batches.cancel(another.id)).status == "cancelling"
    await _delete_files(client, stored.id, done.output_file_id)
    await _list_batches(wire, client, [another.id, batch.id], monkeypatch)
    with pytest.raises(sdk.NotFoundError):
        await client.batches.retrieve("batch_job-0")
    with pytest.raises(sdk.BadRequestError, match="purpose"):
        await client.files.create(file=("in.jsonl", data), purpose="fine-tune")
    await _vanish_in_an_upload(wire)


async def _list_files(client: AsyncOpenAI, stored: str, done: Batch) -> None:
    results = {done.output_file_id, done.error_file_id}
    newest = [one.id async for one in client.files.list(limit=1)]
    assert set(newest[:2]) == results
    assert newest[2:] == [stored]
    oldest = client.files.list(order="asc", limit=2)
    assert [one.id async for one in oldest] == newest[::-1]
    (only,) = [one async for one in client.files.list(purpose="batch")]
    assert (only.id, only.filename, only.purpose) == (stored, "in.jsonl", "batch")
    of_results = client.files.list(purpose="batch_output")
    assert {one.id async for one in of_results} == results
    with pytest.raises(sdk.NotFoundError, match="after: there is no file"):
        await client.files.list(after="file-none")
    with pytest.raises(sdk.BadRequestError, match="limit: must be 1 to 10000"):
        await client.files.list(limit=0)


async def _delete_files(client: AsyncOpenAI, stored: str, output: str) -> None:
    with pytest.raises(
        sdk.BadRequestError, match=r"results are deleted with their job: `sluice batch"
    ):
        await client.files.delete(output)
    deleted = await client.files.delete(stored)
    assert (deleted.id, deleted.deleted) == (stored, True)
    assert not (await client.files.list(purpose="batch")).data
    for gone in (client.files.retrieve, client.files.delete):
        with pytest.raises(sdk.NotFoundError, match="no complete upload"):
            await gone(stored)


async def _vanish_in_an_upload(wire: Wire) -> None:
    connection = await Connection.to(wire.http)
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
    kind = "multipart/form-data; boundary=x"
    await connection.send("/v1/files", form, content_type=kind, content_length="1000")
    await wire.until(lambda: wire.gateway.active == 1)
    connection.close()
    await wire.until(lambda: wire.gateway.active == 0)


async def test_uploads_of_a_tenant_are_counted(http: Wire) -> None:
    uploads = http.gateway.arrivals.uploads
    kind = "multipart/form-data; boundary=x"
    uploads.take("default", UPLOADS_MAX - 1)
    reply = await ask(http.http, "/v1/files", b"", content_type=kind)
    assert (reply.status, reply.error["code"]) == (501, "jobs_disabled")
    uploads.take("default")
    reply = await ask(http.http, "/v1/files", b"", content_type=kind)
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert reply.error["message"] == f"{UPLOADS_MAX} uploads of your tenant are being answered"
    uploads.give("default", UPLOADS_MAX)
    assert not uploads.counts


async def _list_batches(
    wire: Wire, client: AsyncOpenAI, batches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``batches``: newest first. The list reads from jobs what it shows, and no more."""
    read, begin = list[int](), JobForwarder.begin

    def counted(jobs: JobForwarder, by: Any, method: str, *asked: Any, wait_s: float) -> Any:
        read.extend(request.page_size for request in asked if method == "ListJobs")
        return begin(jobs, by, method, *asked, wait_s=wait_s)

    monkeypatch.setattr(JobForwarder, "begin", counted)
    assert [one.id async for one in client.batches.list(limit=1)] == batches
    assert read == [1] * len(batches)
    whole = await ask(wire.http, "/v1/batches", method="GET")
    assert [one["id"] for one in whole.json["data"]] == batches
    assert (whole.json["has_more"], whole.json["last_id"]) == (False, batches[-1])
    end = await ask(wire.http, f"/v1/batches?after={batches[-1]}", method="GET")
    assert (end.json["data"], end.json["has_more"]) == ([], False)
    for after in ("batch_job-0", "job-0", "batch_"):
        unknown = await ask(wire.http, f"/v1/batches?after={after}", method="GET")
        assert unknown.status == 404
        assert unknown.error["message"].startswith("after: there is no ")
    for query in ("limit=0", "limit=101", "before=x"):
        assert (await ask(wire.http, f"/v1/batches?{query}", method="GET")).status == 400
