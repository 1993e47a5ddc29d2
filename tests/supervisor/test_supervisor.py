import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import SetupError
from sluice.settings import Settings
from supervisor.child import LOG_MAX_BYTES, Child, ChildSpec, keep_log_small, log_tail
from supervisor.mesh import running_mesh
from supervisor.orphans import OrphanReaper
from supervisor.state import MeshState, ProcessState, StateDir
from supervisor.supervisor import BACKOFF_MAX_S, BACKOFF_MIN_S, STEADY_S, Backoff, Supervisor

BOUND_S = 60.0
SLEEPER = "import time; time.sleep(600)"
STUBBORN = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write("up")
{SLEEPER}
"""
LINGERING = f"""
import signal, sys
def asked(*_):
    open(sys.argv[1], "w").write("asked")
    open(sys.argv[1] + ".go").read()
    sys.exit()
signal.signal(signal.SIGTERM, asked)
open(sys.argv[1], "w").write("up")
{SLEEPER}
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
open(sys.argv[1], "w").write(str(child.pid))
{SLEEPER}
"""
SUPERVISOR = """
import asyncio, sys
from supervisor.child import ChildSpec
from supervisor.supervisor import BACKOFF_MAX_S, BACKOFF_MIN_S, STEADY_S, Backoff, Supervisor

async def main():
    supervisor = Supervisor()
    for name in sys.argv[3:]:
        supervisor.start(ChildSpec(name, (sys.executable, "-c", sys.argv[1], sys.argv[2])))
    print(*supervisor.pids.values(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def python(
    name: str, program: str, log: Path, pipe: Path = Path(), stop_s: float = 10.0
) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", program, str(pipe)), log=log, stop_s=stop_s)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Where a program tells us how far it is."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


async def told(pipe: Path) -> str:
    """What a program wrote into ``pipe``."""
    return await asyncio.wait_for(asyncio.to_thread(pipe.read_text), BOUND_S)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    await supervisor.stop()


async def gone(pid: int) -> None:
    """Returns when the process (not a child of ours) has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), BOUND_S)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def test_a_killed_process_is_started_again(
    supervisor: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process = supervisor.start(python("sleeper", SLEEPER, tmp_path / "log"))
    before = supervisor.pids["sleeper"]
    os.kill(before, signal.SIGKILL)
    await supervisor.wait_for(lambda: process.restarts == 1, BOUND_S)
    assert supervisor.pids["sleeper"] != before
    assert "sleeper ended (signal SIGKILL); next start in 0.0 s" in caplog.text


async def test_a_process_that_keeps_failing_waits_longer_each_time(
    supervisor: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process = supervisor.start(python("failing", "raise SystemExit(3)", tmp_path / "log"))
    await supervisor.wait_for(lambda: process.restarts == 2, BOUND_S)
    waits = [r.args[2] for r in caplog.records if isinstance(r.args, tuple) and len(r.args) == 3]
    assert waits[:2] == [0.0, 0.2]
    assert "exit code 3" in caplog.text


@given(st.lists(st.floats(min_value=0, max_value=30), max_size=60))
def test_only_what_ends_young_waits_and_ever_longer(runs: list[float]) -> None:
    backoff, before = Backoff(), None
    for ran_s in runs:
        wait_s = backoff.after(ran_s)
        if before is None or ran_s >= STEADY_S:
            assert wait_s == 0.0
        else:
            assert wait_s == min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * before))
        before = wait_s


async def test_stop_is_orderly_stage_by_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    supervisor = Supervisor()
    for name, stage in (("first", 0), ("third", 2), ("second", 1)):
        supervisor.start(replace(python(name, SLEEPER, tmp_path / name), stage=stage))
    pids = supervisor.pids
    await supervisor.stop()
    ends = [
        r.getMessage().split()[1] for r in caplog.records if r.getMessage().startswith("stopped ")
    ]
    assert ends == ["third", "second", "first"]
    assert supervisor.pids == {}
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


async def test_those_of_a_stage_end_together(tmp_path: Path) -> None:
    supervisor, pipes = Supervisor(), []
    for number in range(3):
        pipes.append(tmp_path / f"pipe{number}")
        os.mkfifo(pipes[-1])
        os.mkfifo(f"{pipes[-1]}.go")
        spec = python(f"w{number}", LINGERING, tmp_path / f"log{number}", pipes[-1], stop_s=1e3)
        supervisor.start(replace(spec, stage=1))
    assert [await told(pipe) for pipe in pipes] == ["up"] * 3
    assert supervisor.stop_s == 1e3
    stopping = asyncio.ensure_future(supervisor.stop())
    # None has ended when the last one hears of it.
    assert [await told(pipe) for pipe in pipes] == ["asked"] * 3
    for pipe in pipes:
        await asyncio.to_thread(Path(f"{pipe}.go").write_text, "")
    await stopping


async def test_parts_of_a_process_end_in_its_place(
    tmp_path: Path, pipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    supervisor = Supervisor()
    spec = python("parent", PARENT, tmp_path / "log", pipe, stop_s=1e3)
    supervisor.start(replace(spec, parts_of=lambda pid: _children(pid)))
    part = int(await told(pipe))
    await supervisor.stop()
    await gone(part)
    assert "stopped parent (killed once its models had ended)" in caplog.text


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, pipe: Path) -> None:
    supervisor = Supervisor()
    process = supervisor.start(python("stubborn", STUBBORN, tmp_path / "log", pipe, stop_s=0.1))
    assert await told(pipe) == "up"
    pid = supervisor.pids["stubborn"]
    await supervisor.stop()
    assert process.child is None
    assert not psutil.pid_exists(pid)


async def test_stop_between_two_runs_does_not_wait_for_the_next(tmp_path: Path) -> None:
    supervisor = Supervisor()
    process = supervisor.start(python("failing", "raise SystemExit(3)", tmp_path / "log"))
    await supervisor.wait_for(lambda: process.child is None, BOUND_S)
    await asyncio.wait_for(supervisor.stop(), BOUND_S)
    assert process.restarts <= 1


async def test_grandchildren_end_with_their_parent(
    supervisor: Supervisor, tmp_path: Path, pipe: Path
) -> None:
    supervisor.start(python("parent", PARENT, tmp_path / "log", pipe))
    grandchild = int(await told(pipe))
    os.kill(supervisor.pids["parent"], signal.SIGKILL)
    await gone(grandchild)


async def test_an_exit_during_the_start_names_log_and_last_lines(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    program = "import sys; print('no such model'); sys.exit(4)"
    supervisor.start(python("sleeper", SLEEPER, tmp_path / "other"))
    supervisor.start(python("batcher", program, log))
    with pytest.raises(SetupError) as caught:
        await supervisor.during_start(asyncio.Event().wait())
    assert str(caught.value) == (
        f"batcher ended while starting (exit code 4); log {log}: no such model"
    )


async def test_a_crash_during_the_start_gets_a_second_try(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    crashed = tmp_path / "crashed"
    program = (
        f"import pathlib, os, time; path = pathlib.Path({str(crashed)!r})\n"
        "if not path.exists(): path.touch(); os.abort()\n"
        "time.sleep(600)"
    )
    process = supervisor.start(python("triton", program, tmp_path / "log"))
    await supervisor.during_start(supervisor.wait_for(lambda: process.restarts == 1, BOUND_S))


async def test_a_second_crash_during_the_start_is_an_error(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    program = "import os; os.abort()"
    process = supervisor.start(python("triton", program, tmp_path / "log"))
    with pytest.raises(SetupError, match=r"triton ended while starting \(signal SIGABRT\)"):
        await supervisor.during_start(asyncio.Event().wait())
    assert process.restarts >= 1


async def test_a_missing_program_says_so(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"x cannot be started: .*/no/such/program"):
        supervisor.start(ChildSpec("x", ("/no/such/program",), log=tmp_path / "log"))


async def test_the_watcher_lives_as_long_as_a_run(supervisor: Supervisor, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    async def watcher(child: Child) -> None:
        seen.append(("with", child.pid))
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(("without", child.pid))

    process = supervisor.start(python("sleeper", SLEEPER, tmp_path / "log"), watcher)
    first = supervisor.pids["sleeper"]
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    await supervisor.wait_for(lambda: process.restarts == 1, BOUND_S)
    await asyncio.sleep(0)
    assert seen == [("with", first), ("without", first), ("with", supervisor.pids["sleeper"])]


async def test_a_watcher_that_fails_costs_its_process_a_restart(
    supervisor: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([RuntimeError("watch broke")])

    async def watcher(child: Child) -> None:
        for failure in failures:
            raise failure

    process = supervisor.start(python("sleeper", SLEEPER, tmp_path / "log"), watcher)
    await supervisor.wait_for(lambda: process.restarts == 1, BOUND_S)
    assert "the watcher of sleeper failed" in caplog.text


async def test_a_killed_supervisor_leaves_no_grandchild(pipe: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, PARENT, str(pipe), "a", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    children = [int(pid) for pid in (await process.stdout.readline()).split()]
    grandchild = int(await told(pipe))
    process.kill()
    await process.wait()
    for pid in (grandchild, *children):
        await gone(pid)


async def test_a_killed_reaper_is_replaced(pipe: Path, tmp_path: Path) -> None:
    reaper = OrphanReaper()
    spec = python("parent", PARENT, tmp_path / "log", pipe)
    child = Child(spec)
    grandchild = int(await told(pipe))
    reaper._process.kill()
    reaper._process.wait()
    reaper.watch([child.pid])
    reaper.close()
    assert await child.exited == -signal.SIGKILL
    await gone(grandchild)


async def test_cancelled_stop_still_ends_everything(tmp_path: Path, pipe: Path) -> None:
    supervisor = Supervisor()
    supervisor.start(python("stubborn", STUBBORN, tmp_path / "log", pipe, stop_s=600.0))
    assert await told(pipe) == "up"
    pid = supervisor.pids["stubborn"]
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not psutil.pid_exists(pid)


async def test_a_process_that_ends_at_once_has_a_small_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(LOG_MAX_BYTES + 1)
    child = Child(python("short", "print('again')", log))
    assert await asyncio.wait_for(child.exited, BOUND_S) == 0
    assert log.read_text() == "again\n"
    assert log.with_name("log.1").stat().st_size == LOG_MAX_BYTES + 1


async def test_a_mesh_ends_what_an_earlier_supervisor_left(tmp_path: Path) -> None:
    left = Child(python("nats", SLEEPER, tmp_path / "log"))
    state = StateDir(tmp_path)
    process = ProcessState("nats", left.pid, left.started_unix_ms, 0, 4222, None)
    state.write(MeshState(1, 4, True, 9.5, "127.0.0.1:1", None, "nats://127.0.0.1:2", (process,)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = Settings.model_validate({"gateway": {"address": address}})
        with pytest.raises(SetupError, match="in use"):
            async with running_mesh(settings, tmp_path):
                pass
    assert await asyncio.wait_for(left.exited, BOUND_S) == -signal.SIGKILL


def test_log_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == "nothing written"
    log.write_text("a\n\nb\nc \n")
    assert log_tail(log) == "a | b | c"
    assert log_tail(log, start=3) == "b | c"
    assert log_tail(log, start=99) == "a | b | c"
    log.write_text("info: 1 error\nerror: load failed\n\nAt:\n" + "  x.py(3): y\n" * 9)
    assert log_tail(log).startswith("error: load failed | At: | x.py(3): y |")
    log.write_text("Error " + "word " * 1000)
    assert len(log_tail(log)) <= 600


async def test_a_child_gives_way_to_others(supervisor: Supervisor, tmp_path: Path) -> None:
    """Its threads and children inherit that."""
    program = "import sys, time; print('started', flush=True); time.sleep(60)"
    spec = ChildSpec("x", (sys.executable, "-c", program), log=tmp_path / "log", nice=7)
    supervisor.start(spec)
    (pid,) = supervisor.pids.values()
    assert os.getpriority(os.PRIO_PROCESS, pid) == 7
    # Where the kernel shares cores by session, priorities count inside one.
    assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))


async def test_a_log_is_bounded_while_its_process_writes(tmp_path: Path) -> None:
    log, older = tmp_path / "x.log", tmp_path / "x.log.1"
    program = "while True: print('a line of a flood', flush=True)"
    child = Child(ChildSpec("x", (sys.executable, "-c", program), log=log))
    rotating = asyncio.create_task(keep_log_small(log, max_bytes=10_000, every_s=0.01))
    try:
        async with asyncio.timeout(BOUND_S):
            while not older.exists() or not log.stat().st_size:  # noqa: ASYNC110  files have no event
                await asyncio.sleep(0.01)
    finally:
        rotating.cancel()
        await child.end(1.0)
    assert b"\0" not in log.read_bytes()
