"""All batching policies on a real mesh: `engine: generate`, and the paged engine beside it.

    python bench/policies.py [--json] [--runs N] [--seconds S]

One mesh serves the small tier twice on `SLOTS` slots: with `engine: generate`, and with the paged engine. First a flood
of the mix measures what `generate` answers a second under `length`. A round then plays one trace of the mix, in open
loop at `SHARE` of that for `SECONDS`, under each policy on each engine, one after the other; a reload changes the
policy. Every other round has the opposite order, and each round has a trace of its own (seed: its number), which is the
same for all policies and both engines. The mix, of requests: `CLASSES`, with prompts of `PROMPT` and answers of
`ANSWER` tokens by class; tenants differ by class.

`policies`, tokens/s of answers on `generate` under its own default (no policy is named), from the first arrival to the
last end; peer: on `generate` under `continuous` in the same round, which batches what happens to wait. Refused and late
requests have no tokens. `also`, medians over rounds, for each policy (a preset, or `default`) and each engine
(`generate`, `paged`), as `POLICY_ENGINE_KEY`:

- `tokens_per_s`: as above.
- `padding_share`: of requests times the longest prompt of all batches that the batcher formed, the part that is
  no prompt, by the batcher's metrics. The paged engine packs prompts and computes none of it.
- `ttft_p50_s`, `ttft_p95_s`, `total_p50_s`, `total_p95_s`: of all answered requests, from sending to the first
  token and to the end, by nearest rank.
- `unanswered_share`: of the requests of the trace, those that were refused or late.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, emit, options_of, paired
from bench.support.meshes import mesh_settings
from bench.support.open_load import OpenLoad
from simulator.arrivals import generate, parse_stream
from simulator.results import percentiles
from simulator.trace import Arrival
from sluice import settings as config
from sluice.settings.batching import PRESETS, Policy
from sluice.v1 import inference_pb2_grpc
from supervisor.control import reload_mesh
from supervisor.mesh import Mesh, running_mesh

SLOTS: Final = 8
SHARE: Final = 1.5
"""Of what `generate` answers under `length`: above 1, so that tokens/s are what an engine computes at most."""
SECONDS: Final = 3.0
FLOOD_S: Final = 8.0
WAITING: Final = 3
"""Requests of the flood for each slot."""
CLASSES: Final = {"interactive": 0.5, "standard": 0.3, "bulk": 0.2}
PROMPT: Final = {
    "interactive": "lognormal/40/0.8/200",
    "standard": "lognormal/100/0.8/300",
    "bulk": "lognormal/100/1.0/300",
}
ANSWER: Final = "lognormal/16/0.6/60"
ENGINES: Final = {"generate": "generate", "paged": "transformers"}
PEER: Final = "continuous"
DEFAULT: Final = "default"
"""No policy is named: each model has its engine's."""


@dataclass(frozen=True)
class Result:
    """What a trace gave under one policy on one engine."""

    tokens_per_s: float
    padding_share: float
    ttft_p50_s: float
    ttft_p95_s: float
    total_p50_s: float
    total_p95_s: float
    unanswered_share: float


def bench_settings(policy: str) -> config.Settings:
    """The small tier on both engines; all else as shipped."""
    models = [
        config.ModelSettings.model_validate(
            {"name": name, "path": "builtin:small", "engine": engine, "slots": SLOTS}
        )
        for name, engine in ENGINES.items()
    ]
    pages = {"batcher": "127.0.0.1:0"}
    named = {} if policy == DEFAULT else {"name": policy}
    batcher = config.BatcherSettings(policy=Policy.model_validate(named))
    telemetry = config.TelemetrySettings(prometheus=pages)
    return mesh_settings(*models, batcher=batcher, telemetry=telemetry)


def mix(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Requests of the mix, ``rate`` a second."""
    streams = [
        parse_stream(
            f"poisson:rate={share * rate},class={name},tenant={name},"
            f"prompt={PROMPT[name]},answer={ANSWER}"
        )
        for name, share in CLASSES.items()
    ]
    return generate(streams, seconds, seed)


class PolicyBench:
    """One mesh, whose policy changes."""

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        self._mesh = mesh
        self._file = folder / "bench.yaml"

    async def play(self, engine: str, policy: str, trace: list[Arrival]) -> Result:
        """Play a trace on one engine under a policy."""
        await self._use(policy)
        before = await self._tokens(engine)
        async with grpc.aio.insecure_channel(self._mesh.address) as channel:
            load = OpenLoad(inference_pb2_grpc.InferenceServiceStub(channel), engine)
            answered = await load.play(trace)
        after = await self._tokens(engine)
        return result_of(answered, len(trace), *(b - a for a, b in zip(before, after, strict=True)))

    async def answers_per_s(self) -> float:
        """Return the rate of answers of `generate` under `length`, which the mesh starts with."""
        async with grpc.aio.insecure_channel(self._mesh.address) as channel:
            load = OpenLoad(inference_pb2_grpc.InferenceServiceStub(channel), "generate")
            requests = iter(mix(200.0, 60.0, 0))
            answered = await load.flood(requests, WAITING * SLOTS, FLOOD_S)
        return len(answered) / FLOOD_S

    async def _use(self, policy: str) -> None:
        self._file.write_text(bench_settings(policy).to_yaml(), encoding="utf-8")
        await asyncio.to_thread(reload_mesh, self._mesh.state_dir, self._file)

    async def _tokens(self, model: str) -> tuple[float, float]:
        """Return the batcher's counts of padding and of tokens in the batches of a model."""
        url = f"http://{self._mesh.settings.telemetry.prometheus.get('batcher')}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        lines = [line for line in page.splitlines() if f'"{model}"' in line]

        def count(metric: str) -> float:
            found = (line for line in lines if line.startswith(metric.replace(".", "_")))
            return sum(float(line.rpartition(" ")[2]) for line in found)

        return count("sluice.batch.padding"), count("sluice.batch.tokens")


def result_of(answered: list[Arrival], sent: int, padding: float, tokens: float) -> Result:
    """Return the figures of a trace, of whose batches so many tokens were padding, and so many none."""
    ended = max(arrival.at_s + (arrival.latency_s or 0.0) for arrival in answered)
    first = percentiles(arrival.ttft_s for arrival in answered)
    total = percentiles(arrival.latency_s for arrival in answered)
    return Result(
        tokens_per_s=sum(arrival.answer_tokens for arrival in answered) / ended,
        padding_share=padding / max(1.0, padding + tokens),
        ttft_p50_s=first.p50 or 0.0,
        ttft_p95_s=first.p95 or 0.0,
        total_p50_s=total.p50 or 0.0,
        total_p95_s=total.p95 or 0.0,
        unanswered_share=1 - len(answered) / sent,
    )


Round = Mapping[tuple[str, str], Result]
"""By engine and policy."""


async def bench(runs: int, seconds: float) -> list[Figure]:
    """Play all rounds."""
    names = [*PRESETS, DEFAULT]
    sides = [(engine, name) for name in names for engine in ENGINES]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_mesh(bench_settings("length"), state_dir=Path(folder)) as mesh:
            measured = PolicyBench(mesh, Path(folder))
            rate = SHARE * await measured.answers_per_s()
            print(f"{rate:.1f} requests/s", file=sys.stderr)
            for number in range(1, runs + 1):
                trace = mix(rate, seconds, number)
                order = sides if number % 2 else sides[::-1]
                rounds.append({side: await measured.play(*side, trace) for side in order})
                print(rounds[-1], file=sys.stderr)
    return [figure_of(rounds, rate)]


def figure_of(rounds: list[Round], rate: float) -> Figure:
    """Return the figure of all rounds."""
    also = {
        f"{policy}_{engine}_{key}": statistics.median(
            getattr(one[engine, policy], key) for one in rounds
        )
        for engine, policy in rounds[0]
        for key in Result.__dataclass_fields__
    }
    return paired(
        "policies",
        [one["generate", DEFAULT].tokens_per_s for one in rounds],
        [one["generate", PEER].tokens_per_s for one in rounds],
        unit="tokens/s",
        higher_is_better=True,
        note=f"small tier, {SLOTS} slots, {rate:.1f} requests/s; peer: {PEER}",
        also=also,
    )


async def main(args: argparse.Namespace) -> None:
    """Run and print."""
    emit(await bench(args.runs, args.seconds), args.json)


if __name__ == "__main__":
    parser = options_of(__doc__, "traces")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a trace")
    uvloop.run(main(parser.parse_args()))
