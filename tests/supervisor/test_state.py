import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.errors import SetupError
from supervisor.state import MeshState, ProcessState, StateDir, is_same_process
from supervisor.status import report_of


def mesh_state(pid: int = 1) -> MeshState:
    process = ProcessState("nats", pid, 5, 2, 4222, "/tmp/nats.log")
    nats = "nats://127.0.0.1:2"
    return MeshState(pid, 4, True, 9.5, "127.0.0.1:1", None, nats, (process,))


def test_state_round_trip(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert state.read() is None
    state.write(mesh_state())
    assert state.read() == mesh_state()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json"]
    state.forget()
    assert state.read() is None


async def test_the_state_of_a_supervisor_that_was_killed_says_so(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.write(mesh_state())  # processes with these numbers began at other times

    report = await report_of(state)

    assert not report.ready
    assert report.problem is not None
    assert "the supervisor (pid 1) is gone" in report.problem
    assert not any(process.alive for process in report.processes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 99, "pid": 1}'])
def test_a_file_of_something_else_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert StateDir(tmp_path).read() is None


def test_prometheus_finds_the_pages_of_all_processes_in_a_file(tmp_path: Path) -> None:
    state, seen = StateDir(tmp_path), mesh_state()
    (nats,) = seen.processes
    pages = {"gateway": "127.0.0.1:9464", "triton-small--1": "127.0.0.1:40001"}
    processes = (nats, *(replace(nats, name=name, page=page) for name, page in pages.items()))
    state.write(replace(seen, processes=processes))
    assert json.loads(state.targets.read_text()) == [
        {"targets": ["127.0.0.1:9464"], "labels": {"process": "gateway"}},
        {"targets": ["127.0.0.1:40001"], "labels": {"process": "triton-small--1"}},
    ]
    assert state.read() == replace(seen, processes=processes)
    state.forget()
    assert not list(tmp_path.iterdir())


def test_a_second_supervisor_is_told_of_the_first(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "deep" / "state")
    lock = state.lock()
    state.write(mesh_state(pid=77))
    with pytest.raises(SetupError, match=r"pid 77, 127.0.0.1:1.*sluice down --state-dir"):
        StateDir(state.root).lock()
    assert state.is_locked()
    lock.close()
    lock.close()
    assert not state.is_locked()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from supervisor.state import StateDir\n"
        "lock = StateDir(Path(sys.argv[1])).lock(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert StateDir(tmp_path).is_locked()
        holder.kill()
    assert not StateDir(tmp_path).is_locked()


def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot be made: .*--state-dir"):
        StateDir(tmp_path / "file" / "below").lock()


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        now_ms = time.time_ns() // 1_000_000
        assert is_same_process(process.pid, None)
        assert is_same_process(process.pid, now_ms)
        assert not is_same_process(process.pid, now_ms - 60_000)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_same_process(process.pid, now_ms)
    assert not is_same_process(process.pid, None)


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_create_refuses_a_folder_that_others_can_write(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "a folder"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(SetupError, match=rf"mode {mode:o}.*chmod go-w '.*a folder'"):
        StateDir(root).create()
    root.chmod(0o755)
    StateDir(root).create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_create_refuses_the_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(SetupError, match="uid 12345"):
        StateDir(tmp_path).create()


@pytest.mark.parametrize("name", ["line\nend", "escape\x1b[2J", os.fsdecode(b"latin-\xfc")])
def test_create_refuses_a_path_that_files_cannot_hold(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match="control characters or is not UTF-8"):
        StateDir(tmp_path / name).create()
