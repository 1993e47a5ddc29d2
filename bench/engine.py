"""Benchmark of the engine without the mesh against transformers and llama.cpp, on a Llama of random weights.

    python bench/engine.py [--json] [--runs N] [--figure NAME ...]    on a CPU: 29 M parameters, 32 rows
    python bench/engine.py --device cuda [--profile FILE]             on a GPU: 8 B parameters, 128 rows
    python bench/engine.py --fit                                      what steps cost, for the simulator

Every side computes in bfloat16, or with --dtype float32 in float32 (names of such figures end with _float32), with the
same weights and prompts, greedy and without stop tokens, in a process of its own that sleeps while another side runs.
Prompts are new in every round, so that no prefix cache helps anybody. Peers try out their settings first, on work like
that of a round, and keep the fastest.

- `engine_single_vs_generate`: tokens/s of one row, a prompt of 64 tokens and 64 new ones; peer: `generate`.
- `engine_vs_generate`: of 32 rows, prompts of 16 to 128 tokens; peer: `generate`, padded on the left.
- `engine_vs_generate_batch`, `engine_vs_llamacpp`: the same work; peer: continuous batching of transformers, llama.cpp.
- `decode_vs_memory_floor` (GPU): a step of 4 rows; peer: reading weights and cache at the speed of a copy.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.engine_side import copy_bandwidth
from bench.support.harness import Figure, compare, emit, machine, missing, options_of
from bench.support.llama_model import LARGE, SMALL, write_model
from bench.support.setup import Setup, Work, costs
from bench.support.sides import Side

FLOOR_ROWS: Final = 4
"""A small batch: reading the weights is what a step takes."""


class Rate:
    """Tokens per second of a side, with other prompts in every round; keeps the first answers."""

    def __init__(self, side: Side, work: Work) -> None:
        self._side = side
        self._work = work
        self._rounds = count()
        self.answers: list[list[int]] = []

    async def __call__(self) -> float:
        work = self._work
        took_s, answers = self._side.call("run", work.prompts(next(self._rounds)), work.new_tokens)
        self.answers = self.answers or answers
        return work.rows * work.new_tokens / float(took_s)


async def against(setup: Setup, figure: str, ours: Side, peer: Side, work: Work) -> Figure:
    """Tokens per second of both."""
    rates = Rate(ours, work), Rate(peer, work)
    note = f"{work}; ours: {ours.about}; peer: {peer.about}"
    found = await compare(
        figure, *rates, unit="tokens/s", higher_is_better=True, note=note, runs=setup.runs
    )
    # The same model: in bfloat16 sides differ only where two tokens are nearly as probable.
    same = [a[0] == b[0] for a, b in zip(*(rate.answers for rate in rates), strict=True)]
    note = f"{found.note}; {sum(same)} of {len(same)} first tokens are equal"
    # A token of every row, the prompts' time shared out over them.
    rates_s = {"step_ms": found.ours, "peer_step_ms": found.peer}
    return replace(
        found,
        note=note,
        also={name: work.rows * 1000 / rate for name, rate in rates_s.items() if rate},
    )


async def vs_generate_batch(setup: Setup) -> Figure:
    work = setup.batch
    with setup.engine() as ours, setup.continuous(work) as peer:
        return await against(setup, "engine_vs_generate_batch", ours, peer, work)


async def vs_generate(setup: Setup) -> Figure:
    work = setup.batch
    with setup.engine() as ours, setup.static(work) as peer:
        return await against(setup, "engine_vs_generate", ours, peer, work)


async def single_vs_generate(setup: Setup) -> Figure:
    work = setup.single
    with setup.engine() as ours, setup.static(work) as peer:
        return await against(setup, "engine_single_vs_generate", ours, peer, work)


async def vs_llamacpp(setup: Setup) -> Figure:
    name, work = "engine_vs_llamacpp", setup.batch
    try:
        peer = setup.llamacpp(work)
    except ImportError as error:
        return missing(name, "tokens/s", f"{error}; pip install '.[peers]' brings it")
    with setup.engine() as ours, peer:
        return await against(setup, name, ours, peer, work)


async def decode_vs_memory_floor(setup: Setup) -> Figure:
    """One step of a small batch, and the time that reading weights and cache takes at the speed of a copy."""
    if not setup.on_cuda:
        return missing("decode_vs_memory_floor", "ms", "run with --device cuda")
    bandwidth = copy_bandwidth(4.0)
    with setup.engine() as ours:
        runs = [ours.call("decode_ms", FLOOR_ROWS, 512, 32) for _ in range(setup.runs)]
    took_ms, tokens = sorted(runs)[len(runs) // 2]
    size = setup.shape.weight_bytes + tokens * setup.shape.cache_bytes_per_token
    floor_ms = size / bandwidth * 1000
    note = f"{FLOOR_ROWS} rows of 512 tokens; floor: {size / 1e9:.3g} GB at {bandwidth / 1e12:.3g} TB/s of a copy"
    return Figure(
        *("decode_vs_memory_floor", took_ms, floor_ms, floor_ms / took_ms),
        *("ms", setup.runs, machine(), note),
    )


FIGURES: Final[Mapping[str, Callable[[Setup], Awaitable[Figure]]]] = {
    "engine_single_vs_generate": single_vs_generate,
    "engine_vs_generate": vs_generate,
    "engine_vs_generate_batch": vs_generate_batch,
    "engine_vs_llamacpp": vs_llamacpp,
    "decode_vs_memory_floor": decode_vs_memory_floor,
}
CPU_FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": ("engine_single_vs_generate", "engine_vs_generate", "engine_vs_llamacpp"),
    "bfloat16": ("engine_vs_generate",),
}
CUDA_FIGURES: Final = ("decode_vs_memory_floor", "engine_vs_generate", "engine_vs_generate_batch")


async def bench(setup: Setup, names: Sequence[str], *, as_json: bool) -> None:
    """Prints each figure as soon as it is there: a run that is ended early keeps what it has."""
    suffix = "" if setup.dtype == "bfloat16" else f"_{setup.dtype}"

    card = f"{torch.cuda.get_device_name()}, " if setup.on_cuda else ""

    def show(*figures: Figure) -> None:
        named = [
            replace(found, figure=found.figure + suffix, machine=card + found.machine)
            for found in figures
        ]
        emit(named, as_json)
        sys.stdout.flush()

    for name in names:
        show(await FIGURES[name](setup))


def profile(setup: Setup, file: Path) -> None:
    """Writes where the time of one decoding step of the whole batch goes."""
    with setup.engine() as ours:
        table = ours.call("profile", setup.batch.rows, setup.batch.longest)
    file.write_text(f"{machine()}\n{setup.batch}\n{table}\n", encoding="utf-8")


def main() -> None:
    options = arguments()
    shape = LARGE if options.device == "cuda" else SMALL
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, options.device)
        setup = Setup(model, shape, options.device, options.dtype, options.threads, options.runs)
        if options.fit:
            with setup.engine() as ours:
                for line in costs(ours, options.runs):
                    print(json.dumps(line), flush=True)
            return
        names = options.figure or (CUDA_FIGURES if setup.on_cuda else CPU_FIGURES[setup.dtype])
        if options.profile:
            profile(setup, options.profile)
        asyncio.run(bench(setup, names, as_json=options.json))


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of every side")
    parser.add_argument("--figure", action="append", choices=list(FIGURES), help="only this one")
    parser.add_argument("--fit", action="store_true", help="print engine_cost lines instead")
    parser.add_argument("--profile", type=Path, help="write the profile of a step to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
