"""Limits of tenants over several gateways of a real mesh: what greedy tenants get, and whether others are refused.

A mesh with the echo engine and `--gateways` gateways; each tenant may send `--per-minute` requests a minute with a
burst of `--burst`. Half of the tenants are greedy, by Poisson arrivals of 1.5 times the rate; the others never exceed
theirs: Poisson arrivals behind a token bucket of 95 % of rate and burst. Each tenant's calls are spread over the
gateways with weights of its own, which change now and then. Answers are one token of class interactive.

    python bench/limits.py [--json] [--minutes M] [--tenants N] [--gateways G] [--per-minute R] [--burst B]

- `limit_excess_percent`: of the tenant that got most, what it got above its limit after the first minute (the first
  fifth of a shorter run), percent; bound: 5. `also`: what greedy tenants got of the limit at least, and calls that
  ended otherwise.
- `limit_refusals_below`: refused calls of tenants that stayed under their limit; bound: 0.

The 5 minutes of the defaults send 73,000 requests, 245 a second: a machine that does not follow gives fewer answers,
which `answered_share` says.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, emit, machine
from gateway.admission.token_bucket import TokenBucket
from sluice.errors import LimitReached, from_status
from sluice.settings import GatewaySettings, JobsSettings, ModelSettings, Settings
from sluice.settings.limits import LimitSettings
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from supervisor.mesh import running_mesh

MODEL: Final = "echo"
CALL_S: Final = 20.0
GREED: Final = 1.5
MODEST: Final = 0.95
MOVE: Final = 0.002
"""Probability that a call is the first of its tenant with other weights."""
KNOWN_S: Final = 3.0
"""Gateways know each other after this time, seconds."""


def settings_of(options: argparse.Namespace) -> Settings:
    """One echo model, several gateways."""
    model = ModelSettings(name=MODEL, path="builtin:small", engine="echo", slots=64)
    limits = LimitSettings(
        requests_per_minute=options.per_minute, burst_s=60 * options.burst / options.per_minute
    )
    return Settings(
        models=(model,),
        routing=RoutingSettings(default=MODEL),
        gateway=GatewaySettings(address="127.0.0.1:0", replicas=options.gateways),
        jobs=JobsSettings(replicas=0),
        limits=limits,
    )


@dataclass
class Tenant:
    """One of them: its calls from now on.

    Attributes:
        answered: when, seconds since the start.
        ends: of calls by code; those that its limit refused have "LIMIT".
        asked: calls.
    """

    name: str
    greedy: bool
    dice: random.Random
    answered: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    def arrivals(self, rate_per_s: float, burst: float, until: float) -> Iterator[float]:
        """Times of its calls, seconds."""
        bucket, now = TokenBucket(rate_per_s * MODEST, burst * MODEST, 0.0), 0.0
        while (now := now + self.dice.expovariate(rate_per_s * GREED)) < until:
            if self.greedy or bucket.wait_s(1.0, now) == 0:
                bucket.take(1.0, now)
                yield now

    async def call(self, stub: Any, begun: float) -> None:
        """One call."""
        request = pb.GenerateRequest(
            prompt="one two", model=MODEL, sampling=pb.SamplingParams(max_tokens=1)
        )
        self.asked += 1
        metadata = (("sluice-tenant", self.name),)
        try:
            await stub.GenerateText(request, timeout=CALL_S, metadata=metadata)
            self.answered.append(time.monotonic() - begun)
        except grpc.aio.AioRpcError as failed:
            self.ends["LIMIT" if _is_limit(failed) else failed.code().name] += 1

    async def run(
        self, stubs: list[Any], options: argparse.Namespace, group: asyncio.TaskGroup
    ) -> None:
        """All of its calls, each at its time, whatever becomes of the others (open loop)."""
        begun, weights = time.monotonic(), [self.dice.random() + 0.01 for _ in stubs]
        for at in self.arrivals(options.per_minute / 60, options.burst, 60 * options.minutes):
            if self.dice.random() < MOVE:
                self.dice.shuffle(weights)
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            (stub,) = self.dice.choices(stubs, weights)
            group.create_task(self.call(stub, begun))


def _is_limit(failed: grpc.aio.AioRpcError) -> bool:
    from google.rpc import status_pb2

    details = dict(failed.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    return isinstance(from_status(status_pb2.Status.FromString(bytes(details))), LimitReached)


def figures(tenants: list[Tenant], options: argparse.Namespace) -> list[Figure]:
    """What the calls of ``tenants`` show."""
    rate, until = options.per_minute / 60, 60 * options.minutes
    first = min(60.0, until / 5)
    allowed = rate * (until - first)
    late = {one.name: sum(at >= first for at in one.answered) for one in tenants}
    greedy, modest = (
        [one for one in tenants if one.greedy],
        [one for one in tenants if not one.greedy],
    )
    ends = sum((one.ends for one in tenants), Counter[str]())
    asked = sum(one.asked for one in tenants)
    answered = sum(len(one.answered) for one in tenants) + ends["LIMIT"]
    also = {
        "least_of_greedy_percent": 100 * min(late[one.name] for one in greedy) / allowed,
        "asked": asked,
        "answered_share": answered / asked,
        "failed": sum(ends.values()) - ends["LIMIT"],
    }
    note = (
        f"{options.gateways} gateways, {len(tenants)} tenants, {options.per_minute:g} a minute, burst "
        f"{options.burst:g}, {options.minutes:g} minutes; ends: {dict(ends)}"
    )
    excess = 100 * max(late[one.name] for one in tenants) / allowed - 100
    refused = sum(one.ends["LIMIT"] for one in modest)
    return [
        Figure("limit_excess_percent", excess, None, None, "%", 1, machine(), note, {}, also),
        Figure("limit_refusals_below", refused, None, None, "calls", 1, machine(), note),
    ]


async def measured(options: argparse.Namespace) -> list[Figure]:
    """Runs the mesh and its callers."""
    tenants = [
        Tenant(f"t{number}", number % 2 == 0, random.Random(number))
        for number in range(options.tenants)
    ]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_mesh(settings_of(options), state_dir=Path(folder)) as mesh:
            channels = [grpc.aio.insecure_channel(one) for one in mesh.address.split(",")]
            stubs = [InferenceServiceStub(channel) for channel in channels]
            await asyncio.sleep(KNOWN_S)
            async with asyncio.TaskGroup() as group:
                for one in tenants:
                    group.create_task(one.run(stubs, options, group))
            await asyncio.gather(*(channel.close() for channel in channels))
    return figures(tenants, options)


async def main(options: argparse.Namespace) -> None:
    """Prints the figures."""
    emit(await measured(options), options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tenants", type=int, default=20)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--per-minute", type=float, default=600.0)
    parser.add_argument("--burst", type=float, default=100.0)
    parser.add_argument("--runs", type=int, default=1, help="it is one run in any case")
    uvloop.run(main(parser.parse_args()))
