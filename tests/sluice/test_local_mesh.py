"""The mesh of the state directory, as commands find it."""

import json
from pathlib import Path

import pytest

from sluice.errors import SetupError
from sluice.local_mesh import find_mesh, is_locked, state_root
from supervisor.state import MeshState, StateDir

STATE = MeshState(
    pid=4242,
    started_unix_ms=0,
    ready=True,
    stop_s=1.0,
    address="127.0.0.1:51700,127.0.0.1:51701",
    ca="/somewhere/ca.crt",
    nats_url="nats://127.0.0.1:4222",
    processes=(),
)


def test_find_mesh_reads_what_a_supervisor_wrote(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.lock():
        assert find_mesh(tmp_path) is None
        state.write(STATE)
        key = state.mesh_key()
        found = find_mesh(tmp_path)
    assert found is not None
    assert (found.root, found.pid) == (tmp_path, STATE.pid)
    assert (found.address, found.ca, found.api_key) == (STATE.address, STATE.ca, key)


def test_find_mesh_ignores_the_state_of_a_dead_supervisor(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.lock():
        state.write(STATE)
    assert find_mesh(tmp_path) is None
    assert find_mesh(tmp_path / "none") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"pid": 1})])
def test_find_mesh_ignores_a_strange_state(tmp_path: Path, text: str) -> None:
    state = StateDir(tmp_path)
    with state.lock():
        (tmp_path / "state.json").write_text(text)
        assert find_mesh(tmp_path) is None


def test_a_look_at_the_lock_does_not_take_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert not is_locked(tmp_path)
    with state.lock():
        assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    state.lock().close()


def test_mesh_key_follows_the_configuration(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()
    made = state.mesh_key()
    assert state.mesh_key() == made
    assert state.mesh_key("a configured secret") == "a configured secret"
    assert state.mesh_key() == "a configured secret"


def test_state_root_without_a_home_says_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SLUICE_STATE_DIR", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(SetupError, match=r"no home directory.*--state-dir or SLUICE_STATE_DIR"):
        state_root()
