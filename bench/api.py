"""The HTTP API with `engine: openai` beside other gateways: what a one-token stream costs the process that callers
talk to.

    python -m bench.api [--json] [--runs N]

All are in front of bench/support/openai_upstream.py, in the same rounds, in alternating order, after one warm-up of
each: ours as shipped, LiteLLM's proxy with one worker and without its log of requests, `smg`, a gateway in Rust, with
the policy `passthrough`. `CALLERS` callers in closed loop, `REQUESTS` streams a round, prompts of
bench/support/load.py. Milliseconds of CPU of the gateway's process, without batcher and worker; of a peer, of all its
processes. `SLUICE_LITELLM` and `SLUICE_SMG` name the peers' programs when they are not on PATH (`pip install
'litellm[proxy]'` and `pip install smg`, each into a venv of its own: their dependencies conflict with ours).

- `http_cpu_vs_litellm`: peer: LiteLLM's proxy.
- `http_cpu_vs_smg`: peer: smg.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, emit, missing, options_of, paired
from bench.support.http_load import stream_chats
from bench.support.load import Cost, Processes, cost, families, processes_of, task_prompts
from bench.support.meshes import mesh_of, mesh_settings, ports_of, program
from sluice import settings as config
from sluice.settings.remote import ServerSettings
from sluice.startup import LOOPBACK, free_port

MODEL: Final = "echo"
CALLERS: Final = 32
REQUESTS: Final = 640
START_S: Final = 120.0
SLOTS: Final = 64
PEERS: Final = ("litellm", "smg")


@dataclass(frozen=True)
class Proxy:
    """One side."""

    address: str
    processes: Processes

    async def load(self, seed: int) -> Cost:
        """What a round takes it."""
        texts = task_prompts(REQUESTS, seed)
        return await cost(self.processes, lambda: stream_chats(self.address, MODEL, texts, CALLERS))


async def proxies(runs: int) -> list[Figure]:
    """The figures above."""
    programs = {
        name: os.environ.get(f"SLUICE_{name.upper()}") or shutil.which(name) for name in PEERS
    }
    found: dict[str, list[float]] = {name: [] for name in ("ours", *PEERS)}
    async with upstream() as server, AsyncExitStack() as stack:
        sides = {"ours": await stack.enter_async_context(ours_before(server))}
        for name, path in programs.items():
            if path is not None:
                make = litellm_before if name == "litellm" else smg_before
                sides[name] = await stack.enter_async_context(make(path, server))
        for number in range(runs + 1):
            order = list(sides.items())
            for name, side in order if number % 2 else reversed(order):
                spent = await side.load(number)
                found[name] += [1e3 * spent.all_s / REQUESTS] if number else []
    return [_figure(name, found) for name in PEERS]


def _figure(name: str, found: Mapping[str, list[float]]) -> Figure:
    figure, unit = f"http_cpu_vs_{name}", "ms of CPU"
    if not found[name]:
        return missing(figure, unit, f"SLUICE_{name.upper()} names its program")
    note = f"a one-token stream, {CALLERS} callers; peer: {name}"
    settings = {"callers": CALLERS, "requests": REQUESTS, "slots": SLOTS}
    return paired(
        figure,
        found["ours"],
        found[name],
        unit=unit,
        higher_is_better=False,
        note=note,
        settings=settings,
    )


@asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    """The server behind all; gives its address."""
    async with program("openai_upstream") as process:
        (port,) = await ports_of(process)
        yield f"{LOOPBACK}:{port}"


@asynccontextmanager
async def ours_before(server: str) -> AsyncIterator[Proxy]:
    """The HTTP API of a mesh whose only model is ``server``."""
    behind = ServerSettings(url=f"http://{server}/v1", model=MODEL, api="chat")
    model = config.ModelSettings(
        name=MODEL, path="builtin:small", engine="openai", slots=SLOTS, server=behind
    )
    http = config.HttpSettings(address=f"{LOOPBACK}:0")
    async with mesh_of(mesh_settings(model, http=http)) as mesh:
        assert mesh.http is not None
        yield Proxy(mesh.http, {"gateway": processes_of(mesh)["gateway"]})


@asynccontextmanager
async def litellm_before(path: str, server: str) -> AsyncIterator[Proxy]:
    """LiteLLM's proxy before ``server``."""
    port = free_port()
    behind = {"model": f"openai/{MODEL}", "api_base": f"http://{server}/v1", "api_key": "none"}
    settings = {"model_list": [{"model_name": MODEL, "litellm_params": behind}]}
    with tempfile.TemporaryDirectory(prefix="litellm-") as folder:
        file = Path(folder, "config.yaml")
        file.write_text(yaml.safe_dump(settings))  # noqa: ASYNC240
        where = ("--host", LOOPBACK, "--port", str(port), "--num_workers", "1")
        # Neither side asks for a key: both listen on loopback.
        own = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOG": "ERROR",
        }
        async with _served((path, "--config", str(file), *where), own, port, folder) as proxy:
            yield proxy


@asynccontextmanager
async def smg_before(path: str, server: str) -> AsyncIterator[Proxy]:
    """smg before ``server``."""
    port, metrics = free_port(), free_port()
    options = ("--host", LOOPBACK, "--port", str(port), "--worker-urls", f"http://{server}")
    quiet = ("--policy", "passthrough", "--log-level", "error", "--prometheus-port", str(metrics))
    with tempfile.TemporaryDirectory(prefix="smg-") as folder:
        async with _served((path, "launch", *options, *quiet), {}, port, folder) as proxy:
            yield proxy


@asynccontextmanager
async def _served(
    command: Sequence[str], variables: Mapping[str, str], port: int, folder: str
) -> AsyncIterator[Proxy]:
    """A program that answers at ``port``."""
    log, address = Path(folder, "log"), f"{LOOPBACK}:{port}"
    process = _start(command, variables, log)
    try:
        await _until_it_answers(address, process, log)
        yield Proxy(address, families({"peer": process.pid}))
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


def _start(
    command: Sequence[str], variables: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Its Python must not import our packages."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env={**kept, **variables})


def _said(log: Path) -> str:
    return log.read_text()[-2000:]


async def _until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """smg listens before it knows its worker."""
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the server has ended: {_said(log)}"
        try:
            await asyncio.wait_for(stream_chats(address, MODEL, ["Hello"], 1), 5)
        except (OSError, EOFError, AssertionError, TimeoutError):
            assert time.monotonic() < until, f"the server does not answer: {_said(log)}"
            await asyncio.sleep(0.5)
        else:
            return


def main() -> None:
    options = options_of(__doc__).parse_args()
    emit(uvloop.run(proxies(options.runs)), options.json)


if __name__ == "__main__":
    main()
