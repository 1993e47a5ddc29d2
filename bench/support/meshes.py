"""Meshes and servers that benchmarks start, each gone with what it wrote when its block ends."""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from sluice import settings as config
from sluice.settings.routing import RoutingSettings
from supervisor.mesh import Mesh, running_mesh

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 30.0
END_S: Final = 10.0


def echo(slots: int, **fields: Any) -> config.ModelSettings:
    """A model that computes nothing."""
    given = {"name": "echo", "path": "builtin:small", "engine": "echo", "slots": slots, **fields}
    return config.ModelSettings.model_validate(given)


def mesh_settings(*models: config.ModelSettings, **sections: Any) -> config.Settings:
    """A mesh with ``models``, of which the first one answers; all else as shipped, or as ``sections`` say."""
    shipped = {
        "routing": RoutingSettings(default=models[0].name),
        "gateway": config.GatewaySettings(address="127.0.0.1:0"),
    }
    return config.Settings(models=models, **(shipped | sections))


@asynccontextmanager
async def mesh_of(settings: config.Settings) -> AsyncIterator[Mesh]:
    """The mesh, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with running_mesh(settings, state_dir=Path(folder)) as mesh:
            yield mesh


@asynccontextmanager
async def program(
    module: str, *arguments: str, line_bytes_max: int = 1 << 16
) -> AsyncIterator[Process]:
    """``python -m bench.support.MODULE``, which ends with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"bench.support.{module}", *arguments),
        stdin=PIPE,
        stdout=PIPE,
        cwd=ROOT,
        limit=line_bytes_max,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), END_S)


async def ports_of(process: Process) -> list[int]:
    """The ports that a server prints when it listens."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_S)
    return [int(port) for port in line.split()]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that processes started inside the block inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
