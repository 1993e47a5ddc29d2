"""`sluice drift`."""

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from sluice.client import AsyncClient
from sluice.v1 import admin_pb2 as pb
from sluice.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from tests.cli.commands import Cli, served

ROUTERS = (
    pb.RouterHealth(
        policy="routing",
        version="3f9a12c4d5e6",
        head="ROUTER_HEAD_PROMPT",
        inputs=pb.InputDrift(
            state=pb.DRIFT_STATE_DRIFTED, rows=1000, stability_index=0.41, limit=0.25
        ),
        accuracy=pb.AccuracyDrift(
            state=pb.DRIFT_STATE_DRIFTED, rows=240, bias=-0.12, half_width=0.08, brier=0.2
        ),
    ),
    pb.RouterHealth(
        policy="routing.policies.legal",
        version="3f9a12c4d5e6",
        head="ROUTER_HEAD_CASCADE",
        inputs=pb.InputDrift(
            state=pb.DRIFT_STATE_STABLE, rows=300, stability_index=0.04, limit=0.25
        ),
        accuracy=pb.AccuracyDrift(
            state=pb.DRIFT_STATE_STABLE, rows=240, bias=0.01, half_width=0.08, brier=0.2
        ),
    ),
    pb.RouterHealth(
        policy="routing.policies.new",
        version="000000000000",
        head="ROUTER_HEAD_PROMPT",
        inputs=pb.InputDrift(state=pb.DRIFT_STATE_GATHERING, rows=12, limit=0.25),
        accuracy=pb.AccuracyDrift(state=pb.DRIFT_STATE_GATHERING),
    ),
    pb.RouterHealth(
        policy="routing.policies.few",
        version="000000000000",
        head="ROUTER_HEAD_PROMPT",
        inputs=pb.InputDrift(
            state=pb.DRIFT_STATE_DRIFTED, rows=1000, stability_index=0.2, limit=0.25
        ),
        accuracy=pb.AccuracyDrift(
            state=pb.DRIFT_STATE_GATHERING, rows=3, bias=0.5, half_width=0.9, brier=0.3
        ),
    ),
)


class Admin(AdminServiceServicer):
    def __init__(self, routers: tuple[pb.RouterHealth, ...]) -> None:
        self._routers = routers

    async def GetRouterHealth(self, request: pb.GetRouterHealthRequest, context: Any) -> Any:
        return pb.GetRouterHealthResponse(routers=self._routers, gateway="gw-1")


def serving(*routers: pb.RouterHealth) -> AbstractAsyncContextManager[str]:
    return served(add_AdminServiceServicer_to_server, Admin(routers))


async def test_text_has_a_row_for_each_router(cli: Cli) -> None:
    async with serving(*ROUTERS) as address:
        ran = await cli("drift", "--address", address)
    assert ran.code == 0
    inputs, accuracy = (part.splitlines()[1:] for part in ran.out.split("\n\n"))
    assert inputs[0].split()[3:9] == ["drifted", "0.41", "0.25", "1000", "drifted", "-0.12"]
    assert inputs[2].split()[3:9] == ["gathering", "-", "0.25", "12", "gathering", "-"]
    assert accuracy[1].split()[-2:] == ["0.08", "240"]


async def test_without_a_learned_router_it_says_so(cli: Cli) -> None:
    async with serving() as address:
        ran = await cli("drift", "--address", address)
    assert (ran.code, ran.out) == (0, "no learned router is in use\n")


async def test_for_programs(cli: Cli) -> None:
    async with serving(*ROUTERS) as address:
        ran = await cli("drift", "--json", "--address", address)
        async with AsyncClient(address) as client:
            health = await client.router_health()
    first, _, third, _ = json.loads(ran.out)["routers"]
    assert first["inputs"]["stability_index"] == pytest.approx(0.41)
    assert (first["accuracy"]["state"], first["accuracy"]["bias"]) == ("drifted", -0.12)
    assert third["inputs"]["stability_index"] is None
    assert third["accuracy"]["brier"] is None
    assert [one.head for one in health] == [one.head for one in ROUTERS]
