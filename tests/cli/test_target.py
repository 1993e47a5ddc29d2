"""Which gateway a command calls, and what it says of one that does not answer."""

import json
import os
import socket
from pathlib import Path

import pytest

from supervisor.state import MeshState, StateDir
from tests.cli.commands import Cli
from tests.support.scripted import ScriptedService, delta, finished, started

WHOLE = [started(), delta(0, "abc"), finished()]


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path))
    return StateDir(tmp_path)


def mesh_at(address: str) -> MeshState:
    return MeshState(os.getpid(), 0, True, 1.0, address, None, "nats://127.0.0.1:4222", ())


async def test_a_command_finds_the_running_mesh(cli: Cli, state_dir: StateDir) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        with state_dir.lock():
            state_dir.write(mesh_at(service.address))
            ran = await cli("generate", "hi")
    assert (ran.code, ran.out) == (0, "abc\n"), ran.err


async def test_a_named_gateway_comes_before_the_running_mesh(
    cli: Cli, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedService.serve([WHOLE, WHOLE]) as service:
        with state_dir.lock():
            state_dir.write(mesh_at("127.0.0.1:1"))
            assert (await cli("generate", "hi", "--address", service.address)).code == 0
            monkeypatch.setenv("SLUICE_ADDRESS", service.address)
            assert (await cli("generate", "hi")).code == 0


async def test_the_key_of_the_mesh_goes_to_that_mesh_alone(
    cli: Cli, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedService.serve([WHOLE, WHOLE, WHOLE]) as service:
        with state_dir.lock():
            state_dir.write(mesh_at(service.address))
            key = state_dir.mesh_key()
            await cli("generate", "hi")
            await cli("generate", "hi", "--address", service.address)
            monkeypatch.setenv("SLUICE_API_KEY", "own")
            await cli("generate", "hi")
    given = [dict(metadata).get("authorization") for metadata in service.metadata]
    assert given == [f"Bearer {key}", None, "Bearer own"]


async def test_nothing_runs_anywhere(cli: Cli, state_dir: StateDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    ran = await cli("generate", "hi", "--address", address)
    assert ran.code == 1
    assert ran.err == (
        f"sluice: TRANSPORT_UNAVAILABLE: cannot connect to {address}: Connection refused; no mesh runs in "
        f"{state_dir.root}; start one with `sluice up`, or check SLUICE_ADDRESS and --address\n"
    )


async def test_the_running_mesh_is_elsewhere(cli: Cli, state_dir: StateDir) -> None:
    with state_dir.lock():
        state_dir.write(mesh_at("127.0.0.1:51700"))
        ran = await cli("models", "--address", "127.0.0.1:1", "--json")
    message = json.loads(ran.out)["error"]["message"]
    assert f"the mesh in {state_dir.root} is at 127.0.0.1:51700: leave out --address" in message


async def test_the_gateway_of_the_running_mesh_is_away(cli: Cli, state_dir: StateDir) -> None:
    with state_dir.lock():
        state_dir.write(mesh_at("127.0.0.1:1"))
        ran = await cli("models")
    assert f"the mesh in {state_dir.root} (pid {os.getpid()}) runs, see `sluice status`" in ran.err
