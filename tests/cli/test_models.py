"""`sluice models`."""

import json

from tests.cli.commands import Cli
from tests.support.scripted import ScriptedService


async def test_table(cli: Cli) -> None:
    async with ScriptedService.serve() as service:
        ran = await cli("models", "--address", service.address)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "name   tier   ready  context_tokens  slots  running  queued",
        "small  small  yes               512     32        0       0",
        "large  large  no                512     16        0       0",
    ]


async def test_json(cli: Cli) -> None:
    async with ScriptedService.serve() as service:
        ran = await cli("models", "--json", "--address", service.address)
    small, large = json.loads(ran.out)["models"]
    assert small["name"] == "small"
    assert large["ready"] is False
