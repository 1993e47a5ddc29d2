"""`sluice up`, `down` and `status`, as a user calls them."""

import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cli.main import run
from sluice.client import Client
from sluice.settings import SettingsError, load
from sluice.startup import free_port
from supervisor.control import reload_mesh
from supervisor.model_processes import stub_pids
from supervisor.state import MeshState, StateDir

BOUND_S = 90.0
CONFIG = """
models: [{name: echo, path: "builtin:small", engine: echo}]
routing: {default: echo}
gateway: {address: "127.0.0.1:0", drain_s: 2}
http: {address: "127.0.0.1:0"}
batcher: {drain_s: 2}
"""


class Shell:
    """Runs commands on one state directory."""

    def __init__(self, root: Path) -> None:
        self.state = StateDir(root / "state")
        self.config = root / "sluice.yaml"
        self.config.write_text(CONFIG)
        self._env = {**os.environ, "SLUICE_STATE_DIR": str(self.state.root)}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "cli", *words]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self._env, capture_output=True, text=True, timeout=BOUND_S
        )

    def here(self, *words: str) -> subprocess.CompletedProcess[str]:
        """As `run`, in this process: what ends at once needs none of its own."""
        out, err = io.StringIO(), io.StringIO()
        with patch.dict(os.environ, self._env), redirect_stdout(out), redirect_stderr(err):
            code = run(words)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def json(self, *words: str, code: int = 0) -> Any:
        done = (self.run if "--detach" in words else self.here)(*words, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def open(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*words), env=self._env, stdout=subprocess.PIPE, text=True
        )

    def saved(self) -> MeshState:
        state = self.state.read()
        assert state is not None
        return state


@pytest.fixture
def shell(tmp_path: Path):
    shell = Shell(tmp_path)
    yield shell
    assert shell.here("down").returncode == 0


def await_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], BOUND_S)[0]
    finally:
        os.close(descriptor)


def test_nothing_runs(shell: Shell) -> None:
    done = shell.here("status")
    assert done.returncode == 1
    assert "no mesh is running; start one: sluice up" in done.stderr
    assert shell.here("down").stdout == "no mesh was running\n"
    reload = shell.here("reload")
    assert reload.returncode == 1
    assert f"no mesh is running in {shell.state.root}" in reload.stderr


def test_a_port_in_use_is_one_line(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for detach in ((), ("--detach",)):
            words = ("--config", str(shell.config), "--address", address)
            done = shell.here("up", *words, *detach)
            assert done.returncode == 1
            assert done.stdout == ""
            assert done.stderr.count("\n") == 1
            assert f"gateway.address: {address} is in use by another process" in done.stderr
    assert shell.state.read() is None


RULE = "rules: [{model: echo, reason: r, contains: ['a', '(?<=b)c']}]"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "sluice.yaml: cannot be read"),
        (CONFIG + "safety: {default: nope}\n", "safety.default: no policy 'nope'"),
        (
            CONFIG.replace("{default: echo}", f"{{default: echo, {RULE}}}"),
            "routing.rules.0.contains.1: invalid perl operator",
        ),
    ],
    ids=["missing", "policy", "pattern"],
)
def test_a_configuration_that_cannot_work_is_one_line(
    shell: Shell, config: str | None, problem: str
) -> None:
    shell.config.unlink() if config is None else shell.config.write_text(config)
    done = shell.here("up", "--config", str(shell.config))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert problem in done.stderr


def test_a_model_file_that_cannot_work_is_one_line(shell: Shell) -> None:
    file = shell.config.with_name("model.gguf")
    file.write_bytes(b"PK")
    shell.config.write_text(CONFIG.replace("builtin:small", str(file)))
    for detach in ((), ("--detach",)):
        done = shell.here("up", "--config", str(shell.config), *detach)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"models: echo: {file}: is not a GGUF file" in done.stderr
    assert not shell.state.root.exists()


def test_what_a_detached_supervisor_finds_is_said_by_the_command(shell: Shell) -> None:
    (shell.state.root / "nats.conf").mkdir(parents=True)
    failed = shell.json("up", "--config", str(shell.config), "--detach", code=1)
    assert failed["error"]["reason"] == "SETUP"
    assert f"{shell.state.root / 'nats.conf'}: Is a directory" in failed["error"]["message"]
    assert not shell.state.is_locked()


@pytest.mark.parametrize("name", ["gateway", "batcher"])
def test_one_process_in_the_foreground(shell: Shell, name: str) -> None:
    done = shell.run(name, "--config", str(shell.config), "--id", "x-1")
    assert done.returncode != 0
    assert done.stderr.startswith(f"{name}: ")
    assert ".url" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.mesh
def test_a_worker_in_the_foreground(shell: Shell) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ("--config", str(shell.config), "--port", address.rpartition(":")[2])
    with shell.open("worker", *words) as worker:
        assert worker.stdout is not None
        assert f"ready at {address}\n" in iter(worker.stdout.readline, "")
        worker.send_signal(signal.SIGTERM)
        assert worker.stdout.read() is not None
        assert worker.wait(BOUND_S) == 0


@pytest.mark.mesh
def test_a_mesh_in_the_background(shell: Shell) -> None:
    piped = shell.run("up", "--config", str(shell.config), "--detach")
    assert piped.stderr.splitlines()[:2] == ["starting nats-server", "loading echo"]
    up = asdict(shell.saved())
    names = [process["name"] for process in up["processes"]]
    assert names == ["nats", "triton-echo", "batcher", "gateway", "jobs"]

    status = shell.json("status")
    assert status["ready"]
    assert status["address"] == up["address"]
    assert [process["pid"] for process in status["processes"]] == [
        process["pid"] for process in up["processes"]
    ]
    table = shell.here("status")
    assert table.returncode == 0
    assert f"ready at {up['address']}" in table.stdout

    second = shell.here("up", "--config", str(shell.config))
    assert second.returncode == 1
    assert f"(pid {up['pid']}, {up['address']}); stop it with: sluice down" in second.stderr

    answer = shell.json("generate", "one two", "--max-tokens", "2")
    assert answer["model"] == "echo", "the mesh of the state directory is found"
    explained = shell.json("explain", answer["trace_id"])
    assert explained["record"]["request_id"] == answer["request_id"]
    reload_policies(shell, up["address"])
    reload_file_of_up(shell)

    down = shell.json("down")
    assert down["pid"] == up["pid"]
    assert not down["killed"]
    assert down["leftovers"] == 0
    assert shell.state.read() is None
    for process in up["processes"]:
        await_end(process["pid"])


@pytest.mark.mesh
@pytest.mark.long
def test_a_mesh_starts_after_its_supervisor_was_killed(shell: Shell) -> None:
    up = shell.json("up", "--config", str(shell.config), "--detach")
    pids = [process["pid"] for process in up["processes"]]
    stubs = [stub for pid in pids for stub in stub_pids(pid).values()]
    assert len(stubs) == 1
    os.kill(up["pid"], signal.SIGKILL)
    for pid in (up["pid"], *pids, *stubs):
        await_end(pid)
    stale = shell.json("status", code=1)
    assert f"the supervisor (pid {up['pid']}) is gone" in stale["problem"]
    assert not any(process["alive"] for process in stale["processes"])

    again = shell.json("up", "--config", str(shell.config), "--detach")
    assert shell.json("down")["pid"] == again["pid"]


@pytest.mark.mesh
@pytest.mark.long
def test_a_mesh_in_the_foreground(shell: Shell) -> None:
    with shell.open("up", "--config", str(shell.config)) as up:
        assert up.stdout is not None
        lines = [up.stdout.readline().split() for _ in range(7)]
        assert lines[0] == ["process", "pid", "port", "log"]
        assert lines[6][:2] == ["ready", "in"]
        pids = [int(line[1]) for line in lines[1:6]]
        up.send_signal(signal.SIGINT)
        assert up.wait(BOUND_S) == 0
    for pid in pids:
        await_end(pid)
    assert shell.state.read() is None


@pytest.mark.mesh
def test_a_signal_during_the_start(shell: Shell) -> None:
    with shell.open("up", "--config", str(shell.config)) as up:
        while not shell.state.is_locked():
            assert up.poll() is None
        up.send_signal(signal.SIGTERM)
        assert up.wait(BOUND_S) == 130
    assert shell.state.read() is None


def reload_file_of_up(shell: Shell) -> None:
    """Without a name the file that the mesh was started with is read again."""
    relaxed = CONFIG + "limits: {requests_per_minute: 600}\n"
    shell.config.write_text(relaxed)
    done = shell.here("reload")
    assert "another configuration" in done.stdout, done.stderr
    assert load(shell.state.config).limits.requests_per_minute == 600
    shell.config.write_text(CONFIG + "limits: {requests_per_minute: many}\n")
    refused = shell.here("reload")
    assert refused.returncode == 1
    assert f"{shell.config}: line 7: limits.requests_per_minute: 'many' should be" in refused.stderr
    other = shell.config.with_name("other.yaml")
    other.write_text(CONFIG)
    assert "another configuration" in shell.here("reload", "--config", str(other)).stdout
    assert shell.saved().origin.file == other
    assert "the same configuration, read again" in shell.here("reload").stdout


def reload_policies(shell: Shell, address: str) -> None:
    """The configuration of a running mesh changes where it can, and as a whole or not at all."""
    words = shell.config.with_name("words.txt")
    words.write_text("zebra\n")
    policy = f"safety: {{default: two, policies: {{two: {{deny: ['{words}']}}}}}}\n"
    shell.config.write_text(CONFIG + policy)
    changed = shell.json("reload", "--config", str(shell.config))
    assert (changed["processes"], changed["changed"]) == (["batcher", "gateway"], True)
    with Client(address) as client:
        assert client.check_safety("a heron").policy.startswith("two@")
        assert client.check_safety("a heron").findings == []
        words.write_text("heron\n")
        assert "the same configuration, read again" in shell.here("reload").stdout
        (found,) = client.check_safety("a heron").findings
        assert found.rule == "deny.list"
        before = shell.state.config.read_text()
        for text, says in (
            (
                CONFIG.replace("drain_s: 2}\nh", "drain_s: 2, max_concurrent_requests: 9}\nh"),
                r"gateway\.max_concurrent_requests: cannot be",
            ),
            (CONFIG + "safety: {default: nope}\n", r"safety\.default: no policy 'nope'"),
        ):
            shell.config.write_text(text)
            with pytest.raises(SettingsError, match=says):
                reload_mesh(shell.state, shell.config)
        assert shell.state.config.read_text() == before
        assert client.check_safety("a heron").policy.startswith("two@")
    shell.config.write_text(CONFIG)
