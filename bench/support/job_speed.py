"""Jobs of a benchmark: inputs out of a seed, a client, how long a job took, and items/s beside the engine alone."""

import asyncio
import itertools
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support.engine_side import OurEngine
from bench.support.harness import Figure, compare, paired, percentiles
from bench.support.llama_model import write_served_model
from bench.support.meshes import mesh_of, mesh_settings
from bench.support.sides import Side
from bench.tails import RATE, client
from gateway.config.models import load_catalog
from model_workers.tiers.tasks import heldout
from sluice import settings as config
from sluice.client import AsyncClient
from sluice.errors import WrongJobState
from sluice.settings.models import resolve_model_path
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of
from supervisor.mesh import Mesh

PIECE_BYTES: Final = 512 * 1024
KINDS: Final = 7
"""Cells of the shipped tasks."""

Line = dict[str, Any]


def task_lines(count: int, seed: int, *tokens: int) -> list[Line]:
    """Shipped tasks, none twice, with exactly so many tokens of answer, in turn."""
    examples = heldout(n_per_cell=-(-count // KINDS), seed=seed)[:count]
    return [
        # The number makes two examples of the same text two prompts.
        {"id": f"i{number}", "prompt": f"{number}: {example.prompt}", "max_tokens": length, "min_tokens": length}
        for number, (example, length) in enumerate(zip(examples, itertools.cycle(tokens)))
    ]  # fmt: skip


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

    async def answers(self, job: str) -> list[tuple[str, str]]:
        """Ids and answers, in order."""
        return [(one.custom_id, one.answer.text) async for one in self._client.jobs.results(job)]


@asynccontextmanager
async def job_client(address: str, model: str) -> AsyncIterator[JobClient]:
    """A client of the gateway at ``address``."""
    async with AsyncClient(address) as client:
        yield JobClient(client, model)


ANSWER_TOKENS: Final = (8, 16, 24)
SLOTS: Final = 32
WARM: Final = 200
"""Items of a warm-up."""
BACKGROUND: Final = 20_000
"""Items of the job beside interactive callers: more than it gets through."""
SETTLE_S: Final = 5.0
ALONE_S: Final = 6.0
BESIDE_S: Final = 13.0
"""Less than the interactive calls take."""
CHANGE_S: Final = 30.0
POLL_S: Final = 0.05


@asynccontextmanager
async def jobs_mesh(model: config.ModelSettings) -> AsyncIterator[tuple[Mesh, JobClient]]:
    """A mesh with one model, and a client of its jobs."""
    async with (
        mesh_of(mesh_settings(model)) as mesh,
        job_client(mesh.address, model.name) as jobs,
    ):
        yield mesh, jobs


async def throughput(runs: int, items: int) -> list[Figure]:
    """See bench/jobs.py."""
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as folder:
        return [
            await _throughput("29m", str(write_served_model(Path(folder))), runs, items),
            await _throughput("large", "builtin:large", runs, items),
        ]


async def _throughput(name: str, path: str, runs: int, items: int) -> Figure:
    model = config.ModelSettings(name=name, path=path, slots=SLOTS, dtype="float32")
    rounds = itertools.count(1), itertools.count(1)
    options = {"device": "cpu", "dtype": "float32", "threads": model.threads, "slots": SLOTS}
    tokenizer = load_catalog(mesh_settings(model))[name].tokenizer

    def work(number: int) -> list[Line]:
        return task_lines(items, number, *ANSWER_TOKENS)

    folder = Path(resolve_model_path(path))
    with Side(OurEngine, folder, vocab=tokenizer.vocab_size, **options) as engine:
        async with jobs_mesh(model) as (_, jobs):
            await jobs.run(task_lines(WARM, 0, *ANSWER_TOKENS))

            async def ours() -> float:
                done = await jobs.run(work(next(rounds[0])))
                return done.job.progress.completion_tokens / done.took_s

            async def peer() -> float:
                lines = work(next(rounds[1]))
                rows = sorted(
                    (
                        (tokenizer.encode_chat([{"role": "user", "content": line["prompt"]}]), line["max_tokens"])
                        for line in lines
                    ),
                    key=lambda row: len(row[0]),
                )  # fmt: skip
                took_s = await asyncio.to_thread(engine.call, "answer_s", *zip(*rows, strict=True))
                return sum(line["max_tokens"] for line in lines) / float(took_s)

            return await compare(
                f"jobs_vs_engine_throughput_{name}",
                ours,
                peer,
                unit="tokens/s",
                higher_is_better=True,
                note=f"{items:,} items; peer: {engine.about}, all items at once",
                runs=runs,
                settings={"items": items, "slots": SLOTS, "answer_tokens": ANSWER_TOKENS},
            )


async def interactive(runs: int) -> list[Figure]:
    """See bench/jobs.py."""
    model = config.ModelSettings(name="small", tier="small", path="builtin:small", slots=SLOTS)
    beside: list[list[float]] = []
    alone: list[list[float]] = []
    rates: list[tuple[float, float]] = []
    async with jobs_mesh(model) as (mesh, jobs), client(mesh.address) as person:
        await jobs.run(task_lines(WARM, 0, *ANSWER_TOKENS))
        for round_ in range(1, runs + 1):
            alone.append(await person.interactive(round_))
            job = await jobs.submit(task_lines(BACKGROUND, round_, *ANSWER_TOKENS))
            await asyncio.sleep(SETTLE_S)
            before = await _items_per_s(jobs, job, ALONE_S)
            counting = asyncio.ensure_future(_items_per_s(jobs, job, BESIDE_S))
            beside.append(await person.interactive(round_))
            rates.append((await counting, before))
            await jobs.stop(job)
    note = f"one-token calls, {RATE:g} a second"
    kept, items = zip(*rates, strict=True)
    return [
        *percentiles("jobs_interactive", beside, alone, note),
        paired(
            "jobs_beside_interactive", kept, items, unit="items/s", higher_is_better=True, note=note
        ),
    ]


async def _items_per_s(jobs: JobClient, job: str, seconds: float) -> float:
    begun, before = await _written(jobs, job)
    await asyncio.sleep(seconds)
    ended, after = await _written(jobs, job)
    return (after - before) / (ended - begun)


async def _written(jobs: JobClient, job: str) -> tuple[float, int]:
    """When the progress, which is written once a second, changes, and to how many items."""
    before = (await jobs.progress(job)).succeeded
    async with asyncio.timeout(CHANGE_S):
        while True:
            now = (await jobs.progress(job)).succeeded
            if now != before:
                return time.perf_counter(), now
            await asyncio.sleep(POLL_S)
