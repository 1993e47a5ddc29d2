"""The mesh beside what users would pick, with the same model, on the same machine.

    python bench/peers.py [--json] [--runs N] [--sides SIDE ...]

The model is the Llama of bench/engine.py (29 M parameters, random weights, float32), one thread of torch in each
server, greedy. Sides: the HTTP API of a mesh with one worker of 32 slots, everything else as shipped; and the peers

- `transformers_serve`: `transformers serve --continuous-batching`; `SLUICE_TRANSFORMERS` names a Python that has
  `transformers[serving]`, when ours has not.
- `triton_batcher`: Triton's dynamic batcher (5 ms) before `generate`, over gRPC (`support/triton_generate.py`).
- `litellm`: LiteLLM's proxy before the same `transformers serve`; `SLUICE_LITELLM` names its program.

All run at once, and one is asked at a time, in alternating order, after one warm-up of each. Figures, ours and peer:

- `vs_SIDE_requests_per_s`: `CALLERS` callers in closed loop, `REQUESTS` whole answers of `TOKENS` tokens a run;
  medians. `also` has tokens/s.
- `vs_SIDE_cpu`: the same runs; milliseconds of CPU a request, all processes of the side; medians.
- `vs_SIDE_one_token_pQQ`: `CALLS` answers of one token a run, one after the other; percentiles over the calls of all
  runs, milliseconds.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil
import uvloop
from tritonclient.grpc.aio import InferenceServerClient, InferInput

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.beside_litellm import litellm_before, wait_ready
from bench.support.harness import MIN_RUNS, Figure, emit, machine, run_count
from bench.support.llama_model import write_served_model
from bench.support.open_loop import percentiles
from sluice import settings as config
from sluice.settings.routing import RoutingSettings
from sluice.startup import LOOPBACK, free_port
from supervisor.mesh import running_mesh
from supervisor.triton import (
    TritonConfig,
    prepare_runtime,
    triton_command,
    triton_environment,
)

MODEL: Final = "llama"
SLOTS: Final = 32
CALLERS: Final = 16
REQUESTS: Final = 64
TOKENS: Final = 32
CALLS: Final = 20
STOP_S: Final = 30.0
CALL_S: Final = 120.0
QUESTION: Final = "What is the total of {0}, 272 and 973?"
TRITON_MODEL: Final = """
name: "{name}"
backend: "python"
max_batch_size: {slots}
input [ {{ name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }} ]
input [ {{ name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "answer" data_type: TYPE_STRING dims: [ 1 ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: 5000 }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters [
  {{ key: "folder" value: {{ string_value: "{folder}" }} }},
  {{ key: "threads" value: {{ string_value: "1" }} }}
]
"""

Ask = Callable[[str, int], Awaitable[None]]
"""Prompt and number of tokens; returns when the whole answer is there."""


@dataclass
class Side:
    """A running server, and what was measured of it.

    Attributes:
        ask: asks it.
        processes: gives all its processes.
    """

    name: str
    ask: Ask
    processes: Callable[[], list[psutil.Process]]
    requests_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    one_token_ms: list[float] = field(default_factory=list)

    async def measure(self, seed: int, kept: bool) -> None:
        """One run; not ``kept``: a warm-up."""
        before, begun = self._cpu_s(), time.perf_counter()
        await self._answer_all(seed)
        rate = REQUESTS / (time.perf_counter() - begun)
        cpu_ms = 1000 * (self._cpu_s() - before) / REQUESTS
        waits = [await self._one_token_ms(seed, number) for number in range(CALLS)]
        if kept:
            self.requests_per_s.append(rate)
            self.cpu_ms.append(cpu_ms)
            self.one_token_ms += waits

    async def _answer_all(self, seed: int) -> None:
        prompts = iter([QUESTION.format(1000 * seed + number) for number in range(REQUESTS)])

        async def caller() -> None:
            for prompt in prompts:
                await self.ask(prompt, TOKENS)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))

    async def _one_token_ms(self, seed: int, number: int) -> float:
        begun = time.perf_counter()
        await self.ask(QUESTION.format(1000 * seed + REQUESTS + number), 1)
        return 1000 * (time.perf_counter() - begun)

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes())


async def compared(runs: int, names: list[str]) -> list[Figure]:
    """The figures above, of the peers in ``names``; one that is not installed is reported as missing."""
    async with AsyncExitStack() as stack:
        folder = write_served_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        ours = await stack.enter_async_context(mesh(folder))
        peers, missing = list[Side](), list[str]()
        behind = Behind(stack, folder)
        for name in names:
            try:
                peers.append(await stack.enter_async_context(PEERS[name](behind)))
            except FileNotFoundError as error:
                missing.append(f"{name}: {error}")
        sides = [ours, *peers]
        for number in range(runs + 1):
            for side in sides if number % 2 else reversed(sides):
                await side.measure(number, kept=number > 0)
    for line in missing:
        print(f"not measured: {line}", file=sys.stderr)
    return [figure for peer in peers for figure in figures_of(ours, peer, runs)]


def figures_of(ours: Side, peer: Side, runs: int) -> list[Figure]:
    """Of one peer."""
    name = f"vs_{peer.name}"
    settings = {"callers": CALLERS, "requests": REQUESTS, "tokens": TOKENS, "calls": CALLS}
    rate, peer_rate = statistics.median(ours.requests_per_s), statistics.median(peer.requests_per_s)
    cpu, peer_cpu = statistics.median(ours.cpu_ms), statistics.median(peer.cpu_ms)
    where = f"{CALLERS} callers, answers of {TOKENS} tokens"
    also = {"tokens_per_s": TOKENS * rate, "peer_tokens_per_s": TOKENS * peer_rate}
    rows: list[tuple[Any, ...]] = [
        ("requests_per_s", rate, peer_rate, rate / peer_rate, "requests/s", where, also),
        ("cpu", cpu, peer_cpu, peer_cpu / cpu, "ms of CPU", f"all processes; {where}", {}),
    ]
    return [
        *(
            Figure(f"{name}_{what}", a, b, ratio, unit, runs, machine(), note, settings, more)
            for what, a, b, ratio, unit, note, more in rows
        ),
        *percentiles(f"{name}_one_token", ours.one_token_ms, peer.one_token_ms, runs, "one at a time"),
    ]  # fmt: skip


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[Side]:
    """Ours."""
    model = config.ModelSettings(name=MODEL, path=str(folder), slots=SLOTS, dtype="float32")
    settings = config.Settings(
        models=(model,),
        routing=RoutingSettings(default=MODEL),
        gateway=config.GatewaySettings(address=f"{LOOPBACK}:0"),
        http=config.HttpSettings(address=f"{LOOPBACK}:0"),
    )
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as state:
        async with running_mesh(settings, state_dir=Path(state)) as running:
            assert running.http is not None
            pids = [process.pid for process in running.state.processes if process.pid is not None]
            async with openai_client(running.http, MODEL) as ask:
                yield Side("mesh", ask, lambda: [one for pid in pids for one in family(pid)])


@asynccontextmanager
async def transformers_serve(behind: "Behind") -> AsyncIterator[Side]:
    """`transformers serve`."""
    address, pid = await behind.serving()
    async with openai_client(address, str(behind.folder)) as ask:
        yield Side("transformers_serve", ask, lambda: family(pid))


@asynccontextmanager
async def litellm(behind: "Behind") -> AsyncIterator[Side]:
    """LiteLLM's proxy before `transformers serve`."""
    program = shutil.which(os.environ.get("SLUICE_LITELLM", "litellm"))
    if program is None:
        raise FileNotFoundError("SLUICE_LITELLM names no program")
    address, pid = await behind.serving()
    model = str(behind.folder)
    before = set(family(os.getpid()))
    async with litellm_before(program, address, model) as proxy:
        own = [one for one in family(os.getpid()) if one not in before]
        async with openai_client(proxy, model) as ask:
            yield Side("litellm", ask, lambda: [*own, *family(pid)])


class Behind:
    """The model's folder, and one `transformers serve` for all: each takes half of the memory for its cache."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.folder = folder
        self._stack = stack
        self._server: tuple[str, int] | None = None

    async def serving(self) -> tuple[str, int]:
        """Address and process of the server, which runs until the stack is closed."""
        if self._server is None:
            self._server = await self._stack.enter_async_context(serving(self.folder))
        return self._server


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """`transformers serve`: its address and process."""
    python = os.environ.get("SLUICE_TRANSFORMERS", sys.executable)
    check = (python, "-c", "import fastapi, transformers")
    if (await asyncio.to_thread(subprocess.run, check, capture_output=True)).returncode:
        raise FileNotFoundError("SLUICE_TRANSFORMERS names no Python with transformers[serving]")
    port = free_port()
    command = (python, "-m", "transformers.cli.transformers", "serve", str(folder))
    where = ("--host", LOOPBACK, "--port", str(port), "--dtype", "float32", "--device", "cpu")
    options = (*where, "--continuous-batching")
    async with running((*command, *options), {"OMP_NUM_THREADS": "1"}, port) as pid:
        yield f"{LOOPBACK}:{port}", pid


@asynccontextmanager
async def triton_batcher(behind: Behind) -> AsyncIterator[Side]:
    """Triton with its own dynamic batcher."""
    with tempfile.TemporaryDirectory(prefix="sluice-triton-") as state:
        repository, runtime = Path(state) / "repository", Path(state) / "runtime"
        version = repository / MODEL / "1"
        version.mkdir(parents=True)
        shutil.copy(Path(__file__).parent / "support/triton_generate.py", version / "model.py")
        text = TRITON_MODEL.format(name=MODEL, slots=SLOTS, folder=behind.folder)
        (repository / MODEL / "config.pbtxt").write_text(text)
        prepare_runtime(runtime)
        server = TritonConfig(
            "peer", repository, (MODEL,), runtime, free_port(), "peer", shm_prefix="peer_"
        )
        environment = {**triton_environment(runtime), "OMP_NUM_THREADS": "1"}
        async with (
            running(triton_command(server), environment, server.port) as pid,
            InferenceServerClient(server.address) as client,
        ):
            yield Side("triton_batcher", TritonCaller(client).ask, lambda: family(pid))


@dataclass
class TritonCaller:
    """Asks the model of `triton_batcher`."""

    client: Any

    async def ask(self, prompt: str, tokens: int) -> None:
        """One request of a batch that Triton forms."""
        text, count = (
            InferInput("prompt", [1, 1], "BYTES"),
            InferInput("max_tokens", [1, 1], "INT32"),
        )
        text.set_data_from_numpy(np.array([[prompt.encode()]], dtype=np.object_))
        count.set_data_from_numpy(np.array([[tokens]], dtype=np.int32))
        result = await self.client.infer(MODEL, [text, count], client_timeout=CALL_S)
        assert result.as_numpy("answer") is not None


@asynccontextmanager
async def openai_client(address: str, model: str) -> AsyncIterator[Ask]:
    """Asks /v1/chat/completions."""
    async with httpx.AsyncClient(base_url=f"http://{address}/v1", timeout=CALL_S) as client:

        async def ask(prompt: str, tokens: int) -> None:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "temperature": 0,
            }
            response = await client.post("/chat/completions", json=body)
            assert response.status_code == 200, response.text

        yield ask


@asynccontextmanager
async def running(
    command: tuple[str, ...], environment: dict[str, str], port: int
) -> AsyncIterator[int]:
    """A server that answers at ``port``; its process id."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = await asyncio.to_thread(
            subprocess.Popen, command, stdout=log, stderr=log, env={**os.environ, **environment}
        )
        try:
            await asyncio.to_thread(wait_ready, port, process, Path(log.name))
            yield process.pid
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, STOP_S)


def family(pid: int) -> list[psutil.Process]:
    """A process and its children."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


PEERS: Final = {side.__name__: side for side in (transformers_serve, triton_batcher, litellm)}


async def main(options: argparse.Namespace) -> None:
    """Prints the figures."""
    emit(await compared(options.runs, options.sides), options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS, help="rounds of all sides")
    parser.add_argument("--sides", nargs="+", choices=PEERS, default=list(PEERS), metavar="SIDE")
    uvloop.run(main(parser.parse_args()))
