"""`sluice trace`."""

import json

from cli.explain import waterfall
from sluice.v1 import admin_pb2
from tests.cli.commands import Cli
from tests.cli.test_explain import RECORD, serving


async def test_bars_follow_each_other_and_fit_a_terminal(cli: Cli) -> None:
    async with serving() as (_, address):
        ran = await cli("trace", "req-1", "--address", address)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("req-1: stop; trace abab")
    assert any(line.startswith("other") and "#" in line for line in lines)
    assert max(len(line) for line in lines) <= 80


async def test_for_programs(cli: Cli) -> None:
    async with serving() as (_, address):
        ran = await cli("trace", "req-1", "--address", address, "--json")
    found = json.loads(ran.out)
    starts = [hop["start_ms"] for hop in found["hops"]]
    assert starts == sorted(starts)
    assert found["request_id"] == "req-1"


def test_a_request_without_timings_has_no_bars() -> None:
    assert waterfall(admin_pb2.RequestRecord(error_reason="OVERLOADED")) == []
    hops = waterfall(RECORD)
    last = hops[-1]
    assert last.start_ms + last.ms >= max(hop.ms for hop in hops)
