"""`http_vs_smg`: CPU of our gateway's process for a one-token stream, beside `smg`, a gateway in Rust.

Both are in front of `bench/support/openai_upstream.py`: ours with `engine: openai`, smg with the policy `passthrough`;
`SLUICE_SMG` names its program when it is not on PATH (`pip install smg` into a venv of its own: its protobuf conflicts
with ours). Runs of both sides alternate, after one warm-up of each, `CALLERS` callers in closed loop. Counted is the
process that callers talk to: of the mesh the gateway, without batcher and worker. The ratio is smg's CPU over ours.
"""

import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psutil

from bench.support.beside_litellm import BODY, CALLERS, START_S, mesh_before, upstream, without_ours
from bench.support.harness import Figure, check_runs, machine
from bench.support.http_load import stream_chats
from bench.support.request_cost import processes_of
from sluice.startup import LOOPBACK, free_port

REQUESTS: Final = 2000


async def http_vs_smg(runs: int) -> list[Figure]:
    """See above."""
    check_runs(runs)
    program = os.environ.get("SLUICE_SMG") or shutil.which("smg")
    if program is None:
        note = "the peer is missing: pip install smg into a venv of its own; SLUICE_SMG names it"
        return [Figure("http_vs_smg", None, None, None, "ms", 0, machine(), note, {})]
    async with (
        upstream() as server,
        mesh_before(server) as mesh,
        smg_before(program, server) as (peer, address),
    ):
        assert mesh.http is not None
        gateway = processes_of(mesh)["gateway"]
        ours, theirs = [], []
        for number in range(runs + 1):
            mine = await _cpu_ms(gateway, mesh.http)
            his = await _cpu_ms(peer, address)
            if number:
                ours.append(mine)
                theirs.append(his)
    cost, peer_cost = statistics.median(ours), statistics.median(theirs)
    note = f"CPU a one-token stream of the gateway's process, {CALLERS} callers; peer: smg as a pass-through"
    settings = {"callers": CALLERS, "requests": REQUESTS}
    return [
        Figure("http_vs_smg", cost, peer_cost, peer_cost / cost, "ms", runs, machine(), note, settings)
    ]  # fmt: skip


async def _cpu_ms(process: psutil.Process, address: str) -> float:
    before = sum(process.cpu_times()[:2])
    await stream_chats(address, BODY, CALLERS, REQUESTS)
    return 1000 * (sum(process.cpu_times()[:2]) - before) / REQUESTS


@asynccontextmanager
async def smg_before(program: str, server: str) -> AsyncIterator[tuple[psutil.Process, str]]:
    """smg before ``server``: its process and its address."""
    port, metrics = free_port(), free_port()
    options = ("--host", LOOPBACK, "--port", str(port), "--worker-urls", f"http://{server}")
    quiet = ("--policy", "passthrough", "--log-level", "error", "--prometheus-port", str(metrics))
    with tempfile.TemporaryDirectory(prefix="smg-") as folder:
        log = Path(folder, "log")
        process = _start((program, "launch", *options, *quiet), log)
        try:
            await _until_it_answers(f"{LOOPBACK}:{port}", process, log)
            yield psutil.Process(process.pid), f"{LOOPBACK}:{port}"
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=without_ours())


def _said(log: Path) -> str:
    return log.read_text()[-2000:]


async def _until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """It listens before it knows its worker."""
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"smg has ended: {_said(log)}"
        try:
            await asyncio.wait_for(stream_chats(address, BODY, 1, 1), 5)
        except (OSError, EOFError, AssertionError, TimeoutError):
            assert time.monotonic() < until, f"smg does not answer: {_said(log)}"
            await asyncio.sleep(0.5)
        else:
            return
