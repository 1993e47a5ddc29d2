"""What the mesh keeps of a server's throughput: `engine: openai` before a real vLLM, and that vLLM asked directly.

    python bench/remote.py [--json] [--runs N] [--vllm PYTHON] [--callers N ...] [--api tokens|chat|completions]

`openai_vs_vllm`: tokens/s that the last of --callers (1, 8, 32), in closed loop, get as streams of OpenAI's
/v1/completions, `TOKENS` new tokens each (`ignore_eos`), greedy; peer: the same without the mesh. `also` has what the
others get, as `tokens_per_s_8`, `peer_tokens_per_s_8` and `ratio_8`, and as `cpu_us_a_token_8` the CPU of all processes
of the mesh.

The model is a Llama of 76 M parameters with random weights, in float32 with one OpenMP thread. Prompts are those of
bench/chat.py, which share nothing. Both sides ask one server, in alternating order. The mesh is as shipped. --vllm, or
the variable `SLUICE_VLLM`, names the Python of an environment with vLLM for CPUs (bench/chat.py says how to make one);
without it the figure is missing.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.chat import HOW, SEED, TOKENS, Setup, prompts, version_of, vllm_side
from bench.support.harness import Figure, compare, emit, missing, options_of
from bench.support.http_load import stream_completions
from bench.support.llama_model import MEDIUM, write_served_model
from bench.support.load import Processes, cost, processes_of
from bench.support.meshes import mesh_of, mesh_settings
from sluice import settings as config
from sluice.startup import LOOPBACK

FIGURE: Final = "openai_vs_vllm"
CALLERS: Final = (1, 8, 32)
CALLS: Final = 2
"""Calls of each caller in a round; four of a single one."""
SETUP: Final = Setup("float32", 1)
MODEL: Final = "medium"


class Rate:
    """Tokens/s at one address, with other prompts in every round; and the CPU of ``processes``."""

    def __init__(self, address: str, callers: int, processes: Processes) -> None:
        self._address, self._callers, self._processes = address, callers, processes
        self._rounds = count()
        self._cpu_us: list[float] = []

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU a token, in the median round."""
        return sorted(self._cpu_us)[len(self._cpu_us) // 2]

    async def __call__(self) -> float:
        calls = 4 if self._callers == 1 else CALLS * self._callers
        texts = prompts(SEED + next(self._rounds), calls)
        asking = (self._address, MODEL, texts, TOKENS, self._callers)
        spent = await cost(self._processes, lambda: stream_completions(*asking))
        self._cpu_us.append(1e6 * spent.all_s / (calls * TOKENS))
        return calls * TOKENS / spent.wall_s


async def figures(runs: int, vllm: str | None, api: str, callers: Sequence[int]) -> list[Figure]:
    """The figure of the last number of callers, with what the others get."""
    if vllm is None:
        return [missing(FIGURE, "tokens/s", HOW)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        write_served_model(folder, MEDIUM)
        server = await stack.enter_async_context(
            vllm_side(vllm, folder, SETUP, MODEL, MEDIUM.context)
        )
        behind = {"url": f"http://{server.address}/v1", "model": MODEL, "api": api}
        given = {"name": MODEL, "path": str(folder), "engine": "openai", "server": behind}
        model = config.ModelSettings.model_validate(given)
        http = config.HttpSettings(address=f"{LOOPBACK}:0")
        mesh = await stack.enter_async_context(mesh_of(mesh_settings(model, http=http)))
        assert mesh.http is not None
        also: dict[str, float] = {}
        for number in callers:
            ours = Rate(mesh.http, number, processes_of(mesh))
            figure = await compare(
                *(FIGURE, ours, Rate(server.address, number, {})),
                unit="tokens/s",
                higher_is_better=True,
                note=f"{number} callers, {TOKENS} new tokens each, api {api}; peer: vLLM "
                f"{version_of(vllm)} asked directly",
                runs=runs,
                settings={"callers": number, "tokens": TOKENS, "dtype": SETUP.dtype, "api": api},
            )
            assert figure.ours is not None
            assert figure.peer is not None
            assert figure.ratio is not None
            also |= {
                f"tokens_per_s_{number}": figure.ours,
                f"peer_tokens_per_s_{number}": figure.peer,
                f"ratio_{number}": figure.ratio,
                f"cpu_us_a_token_{number}": ours.cpu_us,
            }
        return [replace(figure, also=also)]


def main() -> None:
    """Print the figure."""
    parser = options_of(__doc__)
    parser.add_argument("--vllm", metavar="PYTHON", default=os.environ.get("SLUICE_VLLM"))
    parser.add_argument("--callers", type=int, nargs="+", default=CALLERS)
    parser.add_argument("--api", choices=("tokens", "chat", "completions"), default="tokens")
    options: argparse.Namespace = parser.parse_args()
    emit(
        uvloop.run(figures(options.runs, options.vllm, options.api, options.callers)), options.json
    )


if __name__ == "__main__":
    main()
