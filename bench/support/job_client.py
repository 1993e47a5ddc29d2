"""Jobs of a benchmark: inputs out of a seed, a client, and how long a job took by the clock of the service."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from model_workers.tiers.tasks import heldout
from sluice.client import AsyncClient
from sluice.errors import WrongJobState
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of

PIECE_BYTES: Final = 512 * 1024
KINDS: Final = 7
"""Cells of the shipped tasks."""

Line = dict[str, Any]


def task_lines(count: int, seed: int, tokens: int) -> list[Line]:
    """Shipped tasks, none twice, each with exactly ``tokens`` tokens of answer."""
    examples = heldout(n_per_cell=-(-count // KINDS), seed=seed)[:count]
    sampling = {"max_tokens": tokens, "min_tokens": tokens}
    return [
        # The number makes two examples of the same text two prompts.
        {"id": f"i{number}", "prompt": f"{number}: {example.prompt}", **sampling}
        for number, example in enumerate(examples)
    ]


def short_lines(count: int, tokens: int) -> Iterator[Line]:
    """Short prompts, none twice."""
    for number in range(count):
        yield {"id": f"i{number}", "prompt": f"item {number} of many", "max_tokens": tokens}


def pieces(lines: Iterator[Line] | Sequence[Line]) -> Iterator[bytes]:
    """A file of ``lines`` as it is uploaded."""
    held = bytearray()
    for line in lines:
        held += json.dumps(line).encode() + b"\n"
        if len(held) >= PIECE_BYTES - 4096:
            yield bytes(held)
            held.clear()
    yield bytes(held)


@dataclass(frozen=True)
class Outcome:
    """The end of a job; seconds by the clock of the service."""

    job: pb.Job

    @property
    def took_s(self) -> float:
        """From its creation to its end."""
        return (ms_of(self.job.end_time) - ms_of(self.job.create_time)) / 1e3

    @property
    def items(self) -> int:
        return self.job.progress.succeeded

    @property
    def items_per_s(self) -> float:
        return self.items / self.took_s

    @property
    def tokens(self) -> int:
        """Computed, of prompts and answers."""
        return self.job.progress.prompt_tokens + self.job.progress.completion_tokens


class JobClient:
    """Submits jobs to a mesh, and waits for them."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def submit(self, lines: Iterator[Line] | Sequence[Line]) -> str:
        """The id of a new job with these items."""
        whole = list(pieces(lines))
        upload = await self._client.jobs.upload("in.jsonl", lambda: iter(whole))
        spec = pb.JobSpec(model=self._model, input=pb.JobInput(upload_id=upload))
        return (await self._client.jobs.create(spec, uuid.uuid4().hex)).id

    async def end(self, job: str) -> Outcome:
        """Waits for a job, which has to answer every item."""
        async for found in self._client.jobs.watch(job, until_paused=True):
            last = found
        assert last.state == pb.JOB_STATE_COMPLETED, f"{last.state}: {last.reason}"
        assert not last.progress.dead, dict(last.report.dead_by_reason)
        return Outcome(last)

    async def run(self, lines: Iterator[Line] | Sequence[Line]) -> Outcome:
        """`submit`, and `end`."""
        return await self.end(await self.submit(lines))

    async def progress(self, job: str) -> pb.JobProgress:
        """How far it is."""
        return (await self._client.jobs.get(job)).progress

    async def stop(self, job: str) -> None:
        """Ends a job, and deletes what is left of it."""
        with suppress(WrongJobState):
            await self._client.jobs.cancel(job)
        await self._client.jobs.delete(job)

    async def first_result_s(self, lines: Iterator[Line] | Sequence[Line]) -> tuple[float, str]:
        """Seconds from the call that creates a job to its first result at the client, and the job."""
        whole = list(pieces(lines))
        upload = await self._client.jobs.upload("in.jsonl", lambda: iter(whole))
        spec = pb.JobSpec(model=self._model, input=pb.JobInput(upload_id=upload))
        begun = time.perf_counter()
        job = (await self._client.jobs.create(spec, uuid.uuid4().hex)).id
        async for _ in self._client.jobs.results(job, follow=True):
            break
        return time.perf_counter() - begun, job

    async def answers(self, job: str) -> list[tuple[str, str]]:
        """Ids and answers, in order."""
        return [(one.custom_id, one.answer.text) async for one in self._client.jobs.results(job)]


@asynccontextmanager
async def job_client(address: str, model: str) -> AsyncIterator[JobClient]:
    """A client of the gateway at ``address``."""
    async with AsyncClient(address) as client:
        yield JobClient(client, model)
