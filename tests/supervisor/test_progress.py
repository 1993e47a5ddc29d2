"""What a start and a stop of a mesh tell the command that waits for them."""

import asyncio
import subprocess
import sys
from pathlib import Path

from supervisor import control
from supervisor.progress import tell_while_waiting
from supervisor.state import MeshState, ProcessState, StateDir

BOUND_S = 60.0


async def test_a_start_tells_what_it_waits_for() -> None:
    waiting, told = {"small": "triton-small", "large": "triton-large"}, list[str]()
    ready = asyncio.get_running_loop().create_future()

    def on_progress(step: str) -> None:
        told.append(step.partition(" (")[0])
        if waiting:
            waiting.popitem()
        elif not ready.done():
            ready.set_result(7)

    names = lambda: ", ".join(waiting.values()) or "gateway"  # noqa: E731
    assert await tell_while_waiting(ready, names, on_progress, every_s=0.001) == 7
    assert told == [
        "waiting for triton-small, triton-large",
        "waiting for triton-small",
        "waiting for gateway",
    ]


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
