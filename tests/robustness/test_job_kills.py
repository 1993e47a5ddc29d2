"""How long a job stands still after a kill."""

import asyncio
from typing import Any, cast

import nats
from nats.aio.client import Client

from sluice.internal.v1.job_pb2 import ItemOutcome, JobSegment
from sluice.wire.subjects import job_results
from tests.robustness.faults.mesh import FaultMesh
from tests.robustness.job_kills import kill_for

SETTLED_S = 0.05


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
        await asyncio.sleep(SETTLED_S)
        await self._client.publish(
            subject, JobSegment(outcomes=[ItemOutcome()]).SerializeToString()
        )


async def test_kill_is_over_with_the_next_items_or_the_job(nats_url: str) -> None:
    client, resumes = await nats.connect(nats_url), list[float]()
    mesh = Killed(nats_url, client, kills=3)
    faulty = cast("FaultMesh", mesh)
    await kill_for(60.0, faulty, "gateway", mesh.ending, resumes, 0.01, SETTLED_S)
    await client.close()
    assert len(resumes) == 2
    assert min(resumes) >= SETTLED_S
