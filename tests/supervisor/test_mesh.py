"""The whole mesh, with the engine that echoes: every process is lost once, and the next request is answered."""

import asyncio
import os
import re
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sluice.client.aio import AsyncClient
from sluice.errors import SetupError
from sluice.settings import Settings, load
from supervisor.mesh import Mesh, running_mesh
from supervisor.state import StateDir
from supervisor.status import report_of
from tests.support.mesh import kill, stubs_of

BOUND_S = 60.0
ERRORS = re.compile(
    r"^E\d{4} (?!.*CudaDriverHelper)|\berror\b|\bfailed\b|exception|Traceback",
    re.IGNORECASE | re.MULTILINE,
)
ALL = ["nats", "triton-echo", "triton-echo.1", "batcher", "gateway", "jobs"]

pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]


def echo_settings() -> Settings:
    model = {"name": "echo", "path": "builtin:small", "engine": "echo", "replicas": 2}
    return Settings.model_validate(
        {
            "models": [model],
            "routing": {"default": "echo"},
            "gateway": {"address": "127.0.0.1:0", "drain_s": 2},
            "batcher": {"drain_s": 2},
        }
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with running_mesh(echo_settings(), tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


async def ask(mesh: Mesh) -> str:
    async with AsyncClient(mesh.address) as client:
        stream = client.generate("one two three", model="echo", max_tokens=4, timeout_s=BOUND_S)
        return (await stream.answer()).text


async def serving(mesh: Mesh) -> None:
    """Returns when `sluice status` would say that all is ready."""
    async with asyncio.timeout(BOUND_S):
        while (report := await report_of(mesh.state_dir)).problem:
            assert report.pid == os.getpid()


async def test_ready_means_that_it_answers(mesh: Mesh) -> None:
    assert await ask(mesh)
    report = await report_of(mesh.state_dir)
    assert report.ready
    assert [process.name for process in report.processes] == ALL
    assert all(process.alive and process.ready for process in report.processes)
    assert [(model.name, model.ready) for model in report.models] == [("echo", True)]
    assert list(mesh.supervisor.pids) == ALL
    assert set(stubs_of(mesh)) == {"echo", "echo.1"}
    assert mesh.state_dir.read() == mesh.state
    assert sorted(os.listdir(mesh.state_dir.logs)) == sorted(f"{name}.log" for name in ALL)


async def test_the_resolved_settings_lie_in_the_state_directory(mesh: Mesh) -> None:
    assert load(mesh.state_dir.config) == mesh.settings
    assert mesh.state_dir.config.stat().st_mode & 0o077 == 0


async def test_a_second_mesh_is_told_of_the_first(mesh: Mesh) -> None:
    with pytest.raises(SetupError, match=r"a mesh is running in .* stop it with: sluice down"):
        async with running_mesh(echo_settings(), mesh.state_dir.root):
            pass
    assert mesh.state_dir.read() == mesh.state


@pytest.mark.parametrize(
    "name",
    [
        "nats",
        pytest.param("triton-echo", marks=pytest.mark.long),
        "batcher",
        pytest.param("gateway", marks=pytest.mark.long),
    ],
)
async def test_a_lost_process_comes_back_on_its_port(mesh: Mesh, name: str) -> None:
    before = await ask(mesh)
    ports = {one.name: one.port for one in mesh.state.processes}
    process = mesh.supervisor.process(name)
    restarts = process.restarts
    pid = kill(mesh, name)
    await mesh.supervisor.wait_for(lambda: process.restarts == restarts + 1, BOUND_S)
    await serving(mesh)
    assert await ask(mesh) == before
    assert mesh.supervisor.pids[name] != pid
    assert {one.name: one.port for one in mesh.state.processes} == ports


async def test_a_stopped_process_is_replaced(mesh: Mesh) -> None:
    before, process = await ask(mesh), mesh.supervisor.process("batcher")
    restarts, child = process.restarts, process.child
    assert child is not None
    child.send(signal.SIGSTOP)
    await mesh.supervisor.wait_for(lambda: process.restarts == restarts + 1, BOUND_S)
    assert await ask(mesh) == before
    assert mesh.supervisor.pids["batcher"] != child.pid


async def test_a_lost_stub_takes_its_own_server_along_and_no_other(mesh: Mesh) -> None:
    before, stubs, pids = await ask(mesh), stubs_of(mesh), mesh.supervisor.pids
    process = mesh.supervisor.process("triton-echo")
    restarts = process.restarts
    os.kill(stubs["echo"], signal.SIGKILL)
    await mesh.supervisor.wait_for(lambda: process.restarts == restarts + 1, BOUND_S)
    assert await ask(mesh) == before
    await serving(mesh)
    assert mesh.supervisor.pids["triton-echo"] != pids["triton-echo"]
    assert stubs_of(mesh)["echo"] != stubs["echo"]
    assert stubs_of(mesh)["echo.1"] == stubs["echo.1"]


@pytest.mark.long
async def test_the_end_of_the_block_is_the_end_of_everything(tmp_path: Path) -> None:
    async with running_mesh(echo_settings(), tmp_path) as mesh:
        pids = [*mesh.supervisor.pids.values(), *stubs_of(mesh).values()]
        assert len(pids) == len(ALL) + 2, "a Python process in each of two Tritons"
        ends = [os.pidfd_open(pid) for pid in pids]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert {name: text for name, text in logs.items() if ERRORS.search(text)} == {}
    for end in ends:
        assert select.select([end], [], [], BOUND_S)[0], (
            "it has ended, or is about to: it was killed"
        )
        os.close(end)
    state = StateDir(tmp_path)
    assert state.read() is None
    assert not state.is_locked()
    report = await report_of(state)
    assert report.problem == "no mesh is running; start one: sluice up"


async def test_a_process_that_cannot_start_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A program of the user's that stands before ours on the path, as far as Python is concerned.
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "batcher.py").write_text("raise SystemExit('batcher: out of order')")
    monkeypatch.setenv("PYTHONPATH", str(shadow))
    monkeypatch.setattr("sluice.startup.sysconfig.get_path", lambda *_: _root())
    with pytest.raises(SetupError) as caught:
        async with running_mesh(echo_settings(), tmp_path / "state"):
            pass
    log = tmp_path / "state" / "logs" / "batcher.log"
    # It is started again at once, and may have written the same line again.
    assert str(caught.value).startswith(
        f"batcher ended while starting (exit code 1); log {log}: batcher: out of order"
    )


def _root() -> str:
    return str(Path(load.__code__.co_filename).resolve().parents[2])
