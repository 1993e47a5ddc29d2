"""Inputs of the benchmarks of jobs: as many items as asked for, none like another."""

import asyncio
import json
from typing import Any, cast

import nats
import pytest
from nats.aio.client import Client

from bench.faults.mesh import FaultMesh
from bench.support import job_kills
from bench.support.job_client import pieces, short_lines, task_lines
from sluice.internal.v1.job_pb2 import ItemOutcome, JobSegment
from sluice.wire.subjects import job_results


def test_tasks_are_new_for_each_seed_and_none_is_there_twice() -> None:
    one, two = (task_lines(300, seed, 16) for seed in (1, 2))
    prompts = [line["prompt"] for line in (*one, *two)]
    assert len(one) == len({line["id"] for line in one}) == 300
    assert len(set(prompts)) == 600
    assert all(line["min_tokens"] == line["max_tokens"] == 16 for line in one)


def test_a_file_is_sent_in_pieces_that_a_call_takes() -> None:
    sent = list(pieces(short_lines(20_000, 8)))
    assert len(sent) > 1
    assert max(map(len, sent)) <= 512 * 1024
    lines = [json.loads(line) for line in b"".join(sent).splitlines()]
    assert lines == list(short_lines(20_000, 8))


class Killed:
    """A mesh that writes a segment when it is killed, and ends its job with the last one."""

    def __init__(self, url: str, client: Client, kills: int) -> None:
        self.nats_urls = [url]
        self.ending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client, self._left = client, kills

    def kill(self, kind: str) -> None:
        self._left -= 1
        if self._left == 0:
            self.ending.set_result(None)
        else:
            self._written = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        subject = job_results("job", 0, 0)
        # An empty segment, as whoever takes a job over writes it, is no progress.
        await self._client.publish(subject, JobSegment().SerializeToString())
        await asyncio.sleep(job_kills.SETTLED_S)
        await self._client.publish(
            subject, JobSegment(outcomes=[ItemOutcome()]).SerializeToString()
        )


async def test_a_kill_is_over_with_the_next_items_or_the_end_of_the_job(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_kills, "EVERY_S", 0.01)
    monkeypatch.setattr(job_kills, "SETTLED_S", 0.05)
    client, resumes = await nats.connect(nats_url), list[float]()
    mesh = Killed(nats_url, client, kills=3)
    await job_kills.kill_for(60.0, cast("FaultMesh", mesh), "gateway", mesh.ending, resumes)
    await client.close()
    assert len(resumes) == 2
    assert min(resumes) >= job_kills.SETTLED_S
