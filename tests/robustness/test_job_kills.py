"""How long a job stands still after a kill."""

import asyncio
from typing import Any, cast

import nats
import pytest
from nats.aio.client import Client

from sluice.internal.v1.job_pb2 import ItemOutcome, JobSegment
from sluice.wire.subjects import job_results
from tests.robustness import job_kills
from tests.robustness.faults.mesh import FaultMesh


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
