"""What a stop of a mesh tells the command that waits for it."""

import subprocess
import sys
from pathlib import Path

from supervisor import control
from supervisor.state import MeshState, ProcessState, StateDir

BOUND_S = 60.0


def test_a_stop_names_what_it_waits_for(tmp_path: Path) -> None:
    state, told = StateDir(tmp_path), list[tuple[str, ...]]()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as supervisor, state.lock():

        def running(*names: str) -> MeshState:
            processes = [ProcessState(name, supervisor.pid, None, 0, None, None) for name in names]
            return MeshState(supervisor.pid, 0, True, 1.0, "", None, "", tuple(processes))

        def on_wait(names: object, left_s: float) -> None:
            assert 0 < left_s <= BOUND_S
            told.append(tuple(names))  # type: ignore[arg-type]
            if len(told) == 1:
                state.write(running("nats"))
            else:
                supervisor.kill()

        state.write(running("nats", "jobs"))
        assert control.await_end(supervisor.pid, BOUND_S, state, on_wait, silent_s=0.01)
    assert told == [("nats", "jobs"), ("nats",)]
