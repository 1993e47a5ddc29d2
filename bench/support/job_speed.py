"""Parts of bench/jobs.py with models that compute: throughput beside the engine alone, and interactive callers."""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bench.support.engine_side import OurEngine
from bench.support.harness import Figure, compare, machine
from bench.support.job_client import JobClient, Line, job_client, task_lines
from bench.support.llama_model import write_served_model
from bench.support.open_loop import QUANTILES, RATE, SECONDS, Client, client, quantile
from bench.support.sides import Side
from gateway.config.models import load_catalog
from sluice import settings as config
from sluice.settings.models import resolve_model_path
from sluice.settings.routing import RoutingSettings
from supervisor.mesh import Mesh, running_mesh

ANSWER_TOKENS: Final = 16
SLOTS: Final = 32
WARM: Final = 200
"""Items of a warm-up."""
BACKGROUND: Final = 20_000
"""Items of the job beside interactive callers: more than it gets through."""
SETTLE_S: Final = 5.0
ALONE_S: Final = 4.0
CHANGE_S: Final = 30.0
POLL_S: Final = 0.05


@asynccontextmanager
async def mesh_of(model: config.ModelSettings) -> AsyncIterator[tuple[Mesh, JobClient]]:
    """A mesh with one model, and a client of its jobs."""
    settings = config.Settings(
        models=(model,),
        routing=RoutingSettings(default=model.name),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
    )
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with (
            running_mesh(settings, state_dir=Path(folder)) as mesh,
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
    tokenizer = load_catalog(
        config.Settings(models=(model,), routing=RoutingSettings(default=name))
    )[name].tokenizer

    def prompts_of(lines: list[Line]) -> list[list[int]]:
        turns = ([{"role": "user", "content": line["prompt"]}] for line in lines)
        return sorted((tokenizer.encode_chat(turn) for turn in turns), key=len)

    folder = Path(resolve_model_path(path))
    with Side(OurEngine, folder, vocab=tokenizer.vocab_size, **options) as engine:
        async with mesh_of(model) as (_, jobs):
            await jobs.run(task_lines(WARM, 0, ANSWER_TOKENS))

            async def ours() -> float:
                done = await jobs.run(task_lines(items, next(rounds[0]), ANSWER_TOKENS))
                assert done.job.progress.completion_tokens == items * ANSWER_TOKENS
                return done.job.progress.completion_tokens / done.took_s

            async def peer() -> float:
                prompts = prompts_of(task_lines(items, next(rounds[1]), ANSWER_TOKENS))
                took_s, _ = await asyncio.to_thread(engine.call, "run", prompts, ANSWER_TOKENS)
                return items * ANSWER_TOKENS / float(took_s)

            return await compare(
                f"jobs_vs_engine_throughput_{name}",
                ours,
                peer,
                unit="tokens/s",
                higher_is_better=True,
                note=f"{items:,} items, answers of {ANSWER_TOKENS} tokens; peer: {engine.about}, all items at once",
                runs=runs,
                settings={"items": items, "slots": SLOTS, "answer_tokens": ANSWER_TOKENS},
            )


async def interactive(runs: int) -> list[Figure]:
    """See bench/jobs.py."""
    model = config.ModelSettings(name="small", tier="small", path="builtin:small", slots=SLOTS)
    beside: list[float] = []
    alone: list[float] = []
    rates: list[tuple[float, float]] = []
    async with mesh_of(model) as (mesh, jobs), client(mesh.address) as person:
        await jobs.run(task_lines(WARM, 0, ANSWER_TOKENS))
        for round_ in range(1, runs + 1):
            alone += await _ask(person, round_)
            job = await jobs.submit(task_lines(BACKGROUND, round_, ANSWER_TOKENS))
            await asyncio.sleep(SETTLE_S)
            before = await _items_per_s(jobs, job, ALONE_S)
            counting = asyncio.ensure_future(_items_per_s(jobs, job, SECONDS))
            beside += await _ask(person, round_)
            rates.append((await counting, before))
            await jobs.stop(job)
    ours, peer = (statistics.median(side) for side in zip(*rates, strict=True))
    note = f"{len(beside)} one-token calls, {RATE:g} a second"
    return [
        *(
            Figure(f"jobs_interactive_p{q}", a, b, b / a, "ms", runs, machine(), note)
            for q in QUANTILES
            for a, b in [(quantile(beside, q), quantile(alone, q))]
        ),
        Figure(
            "jobs_beside_interactive", ours, peer, ours / peer, "items/s", runs, machine(), note
        ),
    ]


async def _ask(person: Client, seed: int) -> list[float]:
    return await person.do(do="open", model="small", rate=RATE, seconds=SECONDS, seed=seed)


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
