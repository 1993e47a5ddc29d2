"""`http_vs_litellm`: what our HTTP API with `engine: openai` adds to a server, beside LiteLLM's proxy.

Both are in front of `bench/support/openai_upstream.py`, as shipped, LiteLLM with one worker; `SLUICE_LITELLM` names
its program when it is not on PATH (its dependencies conflict with ours, so it belongs in a venv of its own). Runs of
both sides alternate, after one warm-up of each. Calls are streams of one token.

- `http_vs_litellm`: requests/s with `CALLERS` callers in closed loop, client on the same machine.
- `http_vs_litellm_added_pQQ`: `RATE` calls/s in open loop, `CALLS` a run; percentiles over the calls of all runs, less
  those of the same calls straight to the server, milliseconds; the ratio is LiteLLM's over ours.
"""

import asyncio
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import yaml

from bench.support.harness import Figure, check_runs, machine
from bench.support.http_load import stream_chats
from bench.support.meshes import mesh_of, mesh_settings, ports_of, program
from sluice import settings as config
from sluice.settings.remote import ServerSettings
from sluice.startup import LOOPBACK, answers, free_port
from supervisor.mesh import Mesh

MODEL: Final = "echo"
CALLERS: Final = 32
REQUESTS: Final = 640
RATE: Final = 20.0
CALLS: Final = 160
START_S: Final = 120.0
SLOTS: Final = 64
QUANTILES: Final = (50, 99)
BODY: Final = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the total of 314, 272, 973?"}],
    "max_tokens": 1,
}


async def http_vs_litellm(runs: int) -> list[Figure]:
    """See above."""
    check_runs(runs)
    program = os.environ.get("SLUICE_LITELLM") or shutil.which("litellm")
    if program is None:
        note = "the peer is missing: pip install 'litellm[proxy]' into a venv of its own; SLUICE_LITELLM names it"
        return [Figure("http_vs_litellm", None, None, None, "requests/s", 0, machine(), note, {})]
    async with (
        upstream() as server,
        sluice_before(server) as ours,
        litellm_before(program, server) as peer,
    ):
        rates: dict[str, list[float]] = {ours: [], peer: []}
        waits: dict[str, list[float]] = {ours: [], peer: [], server: []}
        for number in range(runs + 1):
            for side in (ours, peer) if number % 2 else (peer, ours):
                rates[side].append(await _requests_per_s(side))
            for side in (ours, server, peer) if number % 2 else (peer, server, ours):
                waits[side] += (await _waits_ms(side, number)) if number else []
    return _figures(runs, rates[ours][1:], rates[peer][1:], *(waits[s] for s in (ours, peer, server)))  # fmt: skip


def _figures(
    runs: int,
    ours: list[float],
    peer: list[float],
    ours_ms: list[float],
    peer_ms: list[float],
    direct_ms: list[float],
) -> list[Figure]:
    settings = {"callers": CALLERS, "requests": REQUESTS, "rate": RATE, "calls": CALLS}
    rate, peer_rate = statistics.median(ours), statistics.median(peer)
    note = f"one-token streams through `engine: openai`, {CALLERS} callers; peer: LiteLLM's proxy, one worker"
    found = [
        Figure("http_vs_litellm", rate, peer_rate, rate / peer_rate, "requests/s", runs, machine(), note, settings)
    ]  # fmt: skip
    for percent in QUANTILES:
        direct = _quantile(direct_ms, percent)
        added, peer_added = _quantile(ours_ms, percent) - direct, _quantile(peer_ms, percent) - direct  # fmt: skip
        name = f"http_vs_litellm_added_p{percent}"
        note = f"added to the server's {direct:.2g} ms at {RATE:g} calls/s; peer: LiteLLM's proxy"
        found.append(
            Figure(name, added, peer_added, peer_added / added, "ms", runs, machine(), note, settings)
        )  # fmt: skip
    return found


@asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    """The server behind both; gives its address."""
    async with program("openai_upstream") as process:
        (port,) = await ports_of(process)
        yield f"{LOOPBACK}:{port}"


@asynccontextmanager
async def sluice_before(server: str) -> AsyncIterator[str]:
    """The HTTP API of a mesh whose only model is ``server``."""
    async with mesh_before(server) as mesh:
        assert mesh.http is not None
        yield mesh.http


@asynccontextmanager
async def mesh_before(server: str) -> AsyncIterator[Mesh]:
    """A mesh whose only model is ``server``."""
    behind = ServerSettings(url=f"http://{server}/v1", model=MODEL, api="chat")
    model = config.ModelSettings(
        name=MODEL, path="builtin:small", engine="openai", slots=SLOTS, server=behind
    )
    http = config.HttpSettings(address=f"{LOOPBACK}:0")
    async with mesh_of(mesh_settings(model, http=http)) as mesh:
        yield mesh


@asynccontextmanager
async def litellm_before(program: str, server: str, model: str = MODEL) -> AsyncIterator[str]:
    """LiteLLM's proxy before ``model`` of ``server``; gives its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="litellm-") as folder:
        process = _start_litellm(program, server, port, Path(folder), model)
        try:
            await asyncio.to_thread(wait_ready, port, process, Path(folder, "log"))
            yield f"{LOOPBACK}:{port}"
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)


def _start_litellm(
    program: str, server: str, port: int, folder: Path, model: str
) -> subprocess.Popen[bytes]:
    behind = {"model": f"openai/{model}", "api_base": f"http://{server}/v1", "api_key": "none"}
    settings = {"model_list": [{"model_name": model, "litellm_params": behind}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    where = ("--host", LOOPBACK, "--port", str(port), "--num_workers", "1")
    # Neither side asks for a key: both listen on loopback.
    own = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with (folder / "log").open("wb") as out:
        return subprocess.Popen(
            (program, "--config", str(folder / "config.yaml"), *where),
            stdout=out,
            stderr=out,
            env={**without_ours(), **own},
        )


def without_ours() -> dict[str, str]:
    """Its Python must not import our packages."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when ``process``, which writes ``log``, answers at ``port``."""
    until = time.monotonic() + START_S
    while not answers(LOOPBACK, port, 1.0):
        assert process.poll() is None, f"the server has ended: {log.read_text()[-2000:]}"
        assert time.monotonic() < until, f"the server does not answer: {log.read_text()[-2000:]}"
        time.sleep(0.2)


async def _requests_per_s(address: str) -> float:
    begun = time.perf_counter()
    await stream_chats(address, BODY, CALLERS, REQUESTS)
    return REQUESTS / (time.perf_counter() - begun)


async def _waits_ms(address: str, seed: int) -> list[float]:
    """How long each call took; the arrivals are the same for each side."""
    draw, waits, at = random.Random(seed), [], 0.0
    begun = time.perf_counter()

    async def call(due: float) -> None:
        await asyncio.sleep(begun + due - time.perf_counter())
        started = time.perf_counter()
        await stream_chats(address, BODY, 1, 1)
        waits.append(1e3 * (time.perf_counter() - started))

    async with asyncio.TaskGroup() as calls:
        for _ in range(CALLS):
            at += draw.expovariate(RATE)
            calls.create_task(call(at))
    return waits


def _quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
