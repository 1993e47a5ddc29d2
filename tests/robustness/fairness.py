"""Shares of two tenants when one floods the mesh: two gateways, two batchers, one worker, real processes.

`flooded_tenant_share_error_mesh`: tenant "many" makes --calls bulk calls (110,000), `MANY` at a time; tenant "few" a
tenth of them, `FEW` at a time. Both have the same weight, half of each tenant's callers are at each gateway, and a
call that is refused is made again after its RetryInfo. The echo engine has `SLOTS` slots and `STEP_MS` a step, one
token a call, so that the worker is what both wait for. Answers count from the moment when each tenant has had one of
`WARM` of its calls to the moment when "few" begins its last call. ours: how far the share of "few" is from a half, a
share of it (bound: 0.01). `also`: calls that ended (all must), calls that failed otherwise than by a refusal (0),
refusals, and the answers counted.

    scripts/robustness fairness [--calls N] [--json]
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from bench.support.harness import Figure, emit, machine
from sluice import settings as config
from sluice.client.channel import error_of
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.robustness.faults.mesh import Topology
from tests.robustness.faults.start import fault_mesh, mesh_settings

CALLS: Final = 110_000
MANY: Final = 1000
FEW: Final = 200
SLOTS: Final = 12
STEP_MS: Final = 40.0
WARM: Final = 50
CALL_S: Final = 60.0
SEED: Final = 30
TOPOLOGY: Final = Topology(gateways=2, batchers=2)


@dataclass
class Flood:
    """Two tenants and what became of their calls.

    Attributes:
        left: the numbers of each tenant's calls.
        warm: answers of each tenant before any counts.
        ended: answers by tenant.
        counted: those among them that count.
    """

    left: dict[str, Iterator[int]]
    warm: int
    ended: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    over: bool = False

    def answered(self, tenant: str) -> None:
        """One more answer."""
        self.ended[tenant] += 1
        if not self.over and min(self.ended["many"], self.ended["few"]) > self.warm:
            self.counted[tenant] += 1

    @property
    def error(self) -> float:
        """How far the share of "few" is from a half, a share of it."""
        return abs(2 * self.counted["few"] / self.counted.total() - 1)

    async def caller(self, stub: Any, tenant: str, chance: random.Random) -> None:
        """One call after the other until none is left."""
        for number in self.left[tenant]:
            await self._ask(stub, tenant, number, chance)
        self.over |= tenant == "few"  # nothing is left of its calls

    async def _ask(self, stub: Any, tenant: str, number: int, chance: random.Random) -> None:
        sampling = pb.SamplingParams(max_tokens=1)
        request = pb.GenerateRequest(
            prompt=f"document {number}", sampling=sampling, priority=pb.PRIORITY_BULK
        )
        while True:
            try:
                async for _ in stub.Generate(
                    request, timeout=CALL_S, metadata=(("sluice-tenant", tenant),)
                ):
                    pass
                return self.answered(tenant)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.failed[error.code().name] += 1
                    return None
                self.refused += 1
                await asyncio.sleep((error_of(error).retry_after_s or 1.0) * chance.uniform(1, 1.5))


async def flood(addresses: list[str], calls: int) -> Flood:
    """Both tenants make their calls."""
    few = calls // 10
    found = Flood({"many": iter(range(calls)), "few": iter(range(few))}, few // WARM)
    chance = random.Random(SEED)
    channels = [grpc.aio.insecure_channel(address) for address in addresses]
    try:
        async with asyncio.TaskGroup() as group:
            for tenant, callers in (("many", MANY), ("few", FEW)):
                for number in range(callers):
                    stub = InferenceServiceStub(channels[number % len(channels)])
                    group.create_task(found.caller(stub, tenant, chance))
    finally:
        for channel in channels:
            await channel.close()
    return found


def figures(found: Flood, calls: int) -> list[Figure]:
    """What was found."""
    return [
        Figure(
            figure="flooded_tenant_share_error_mesh",
            ours=found.error,
            peer=None,
            ratio=None,
            unit="of its share",
            runs=1,
            machine=machine(),
            note=f"{calls:,} calls of one tenant, a tenth of another's",
            also={
                "ended": found.ended.total(),
                "failed": found.failed.total(),
                "refused": found.refused,
                "counted": found.counted.total(),
            },
        )
    ]


async def main(options: argparse.Namespace) -> int:
    """Prints the figure; the exit code is 1 when a call failed or was lost."""
    settings = mesh_settings(TOPOLOGY)
    model = settings.models[0].model_copy(
        update={"engine": "echo", "slots": SLOTS, "echo_step_ms": STEP_MS}
    )
    settings = config.Settings.model_validate(
        {**settings.model_dump(), "models": [model.model_dump()]}
    )
    with tempfile.TemporaryDirectory(prefix="sluice-fairness-") as folder:
        async with fault_mesh(TOPOLOGY, Path(folder), settings) as mesh:
            found = await flood(mesh.addresses, options.calls)
    emit(figures(found, options.calls), options.json)
    if found.failed:
        print(dict(found.failed), file=sys.stderr)
    return int(found.ended.total() != options.calls + options.calls // 10)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--calls", type=int, default=CALLS, help="of the tenant that floods")
