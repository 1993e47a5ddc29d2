"""What a mesh keeps of the engine behind it, and of a plain gRPC stream.

    python bench/mesh.py [--json] [--runs N] [PART ...]

Callers in closed loop on the same cores, prompts of bench/support/load.py; everything as shipped, but one model alone.
Each side has a client that reads every token, and rounds of both alternate after one warm-up of each.

`engine_share`  `engine_share_large`, `engine_share_29m`: tokens/s of `STREAMS` callers, `REQUESTS` answers of 16 to 96
                tokens; peer: as many rows at a time, sent as tokens straight into the same worker in Triton, those that
                wait together in one batch. The models are the shipped large tier and a Llama of 29 M parameters.
`echo`          `mesh_echo_vs_grpc`: tokens/s of `STREAMS` callers of the engine `echo` with as many slots, answers of
                128 to 512 tokens; peer: a grpc.aio server that streams one token a message, the same requests.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, Part, compare, options_of, run_parts
from bench.support.llama_model import write_served_model
from bench.support.load import Load, Server, bare_server, closed_loop, processes_of
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.triton_direct import DirectWorker, row
from gateway.config.models import load_catalog
from sluice import settings as config
from sluice.v1 import inference_pb2, inference_pb2_grpc

STREAMS: Final = 64
ANSWERS: Final = Load(STREAMS, 192, (16, 32, 64, 96))
ECHOES: Final = Load(STREAMS, 192, (128, 256, 384, 512))


class Reader:
    """Reads every token of answers, with the plain stub."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.tokens = 0

    async def ask(self, request: inference_pb2.GenerateRequest) -> None:
        """Adds its tokens."""
        async for response in self._stub.Generate(request):
            self.tokens += len(response.delta.token_ids)


async def engine_share(given: argparse.Namespace) -> list[Figure]:
    """See the module."""
    large = config.ModelSettings(name="large", tier="large", path="builtin:large")
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as folder:
        path = str(write_served_model(Path(folder)))
        other = config.ModelSettings(name="29m", tier="large", path=path)
        return [await _share(model, given.runs) for model in (large, other)]


async def _share(model: config.ModelSettings, runs: int) -> Figure:
    settings, seeds = mesh_settings(model), (count(), count())
    tokenizer = load_catalog(settings)[model.name].tokenizer
    async with (
        mesh_of(settings) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
        DirectWorker(mesh.worker_address(model.name), model.name) as direct,
    ):
        reader = Reader(channel)

        async def through_mesh() -> float:
            before = reader.tokens
            asked = ANSWERS.of(model.name, next(seeds[0]))
            seconds = await closed_loop(STREAMS, asked, reader.ask)
            return (reader.tokens - before) / seconds

        async def straight() -> float:
            before = direct.tokens
            rows = [
                row(
                    tokenizer.encode_chat([{"role": "user", "content": one.prompt}]),
                    one.sampling.max_tokens,
                    one.sampling.min_tokens,
                )
                for one in ANSWERS.of(model.name, next(seeds[1]))
            ]
            seconds = await closed_loop(STREAMS, rows, direct.ask)
            return (direct.tokens - before) / seconds

        return await compare(
            f"engine_share_{model.name}",
            through_mesh,
            straight,
            unit="tokens/s",
            higher_is_better=True,
            runs=runs,
            note=f"{STREAMS} callers, {model.slots} slots; peer: straight into Triton",
            settings={"callers": STREAMS, "answers": ANSWERS.answers, "tokens": ANSWERS.tokens},
        )


async def echoes(given: argparse.Namespace) -> list[Figure]:
    """See the module."""
    async with (
        mesh_of(mesh_settings(echo(STREAMS))) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
        bare_server() as bare,
    ):
        ours = Server(channel, "echo", processes_of(mesh))
        peer = Server(bare.channel, "bare", bare.processes)

        async def rate(server: Server) -> float:
            reader = Reader(server.channel)
            seconds = await closed_loop(STREAMS, ECHOES.of(server.model, 0), reader.ask)
            assert reader.tokens == ECHOES.answer_tokens, "every token comes"
            return reader.tokens / seconds

        return [
            await compare(
                "mesh_echo_vs_grpc",
                lambda: rate(ours),
                lambda: rate(peer),
                unit="tokens/s",
                higher_is_better=True,
                runs=given.runs,
                note=f"{STREAMS} callers; peer: one token a message",
                settings={"answers": ECHOES.answers, "tokens": ECHOES.tokens},
            )
        ]


PARTS: Final[Mapping[str, Part]] = {"engine_share": engine_share, "echo": echoes}


def main() -> None:
    uvloop.run(run_parts(options_of(__doc__), PARTS))


if __name__ == "__main__":
    main()
