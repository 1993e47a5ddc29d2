"""The command as a process: what it loads, how it streams, how signals and closed pipes end it."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.cli.commands import BOUND_S, Ran, process
from tests.support.scripted import Hold, ScriptedService, delta, finished, started

PRODUCT = ("batcher", "gateway", "jobs", "learning", "model_workers", "simulator", "supervisor")
HEAVY = ("numpy", "opentelemetry.sdk", "psutil", "pydantic", "rich", "torch", "uvloop", "yaml")
MISSING = (
    *PRODUCT,
    "nats",
    "numpy",
    "psutil",
    "pydantic_settings",
    "torch",
    "tritonclient",
    "uvloop",
    "yaml",
)
BARE = f"""
import importlib.abc, io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "opentelemetry.sdk" or name.partition(".")[0] in {MISSING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from cli.main import run

results = []
for words in json.load(sys.stdin):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(words)
    results.append((code, out.getvalue(), err.getvalue()))
json.dump(results, sys.stdout)
"""
"""Runs command lines where only the client is installed, with typer and what that needs: rich and pydantic."""
LOADED = f"""
import importlib, json, sys

loaded = {{}}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = sorted({ {*PRODUCT, *HEAVY, "nats", "tritonclient"} } & sys.modules.keys())
json.dump(loaded, sys.stdout)
"""
MODULES = (
    "sluice.client",
    *(f"cli.{name}" for name in ("main", "generate", "mesh", "explain", "keys")),
    *(f"cli.{name}" for name in ("safety", "evaluate", "demo", "process")),
)


def bare(*lines: Sequence[str]) -> list[Ran]:
    """How each command line ends, one after the other in one process."""
    ran = subprocess.run(
        [sys.executable, "-c", BARE],
        input=json.dumps(lines),
        capture_output=True,
        check=True,
        text=True,
    )
    return [Ran(*result) for result in json.loads(ran.stdout)]


def test_modules_of_commands_import_nothing_heavy() -> None:
    command = [sys.executable, "-c", LOADED, *MODULES]
    ran = subprocess.run(command, capture_output=True, check=True, text=True)
    assert json.loads(ran.stdout) == {name: [] for name in MODULES}


def test_without_extras_the_commands_of_the_client_work() -> None:
    lines = ["models"], ["generate", "p"], ["explain", "req-1"], ["safety", "check", "p"]
    listed, *asked = bare(["--help"], *([*words, "--address", "127.0.0.1:1"] for words in lines))
    assert (listed.code, listed.err) == (0, "")
    assert "generate" in listed.out
    for words, ran in zip(lines, asked, strict=True):
        assert ran.code == 1
        assert ran.err.startswith("sluice: TRANSPORT_UNAVAILABLE: "), words


def test_a_command_says_which_extra_it_needs() -> None:
    needs = {
        "up": "mesh",
        "status": "mesh",
        "demo": "mesh",
        "record --out /dev/null": "mesh",
        "simulate": "mesh",
        "eval --address 127.0.0.1:1": "mesh",
        "gateway --config c.yaml": "gateway",
        "batcher --config c.yaml": "batcher",
        "worker --config c.yaml": "worker",
    }
    for ran, extra in zip(bare(*map(str.split, needs)), needs.values(), strict=True):
        assert ran.code == 1
        says = f"sluice: NOT_INSTALLED: needs `pip install '.[{extra}]' ./distributions/mesh` in"
        assert ran.err.startswith(says)
        assert len(ran.err.splitlines()) == 1


async def test_text_comes_as_it_is_sent() -> None:
    hold = Hold()
    script = [started(), delta(0, "ab"), hold, delta(2, "c"), finished()]
    async with (
        ScriptedService.serve([script]) as service,
        process(service.address, "generate", "p") as running,
    ):
        assert running.stdout is not None
        first = await asyncio.wait_for(running.stdout.readexactly(2), BOUND_S)
        assert first == b"ab"
        hold.release.set()
        out, err = await asyncio.wait_for(running.communicate(), BOUND_S)
    assert (running.returncode, out, err) == (0, b"c\n", b"")


@pytest.mark.parametrize("as_json", [False, True])
async def test_ctrl_c_cancels_the_request(as_json: bool) -> None:
    hold = Hold()
    options = ["--json"] if as_json else []
    async with (
        ScriptedService.serve([[started(), delta(0, "ab"), hold]]) as service,
        process(service.address, "generate", "p", *options) as running,
    ):
        await asyncio.wait_for(hold.reached.wait(), BOUND_S)
        if not as_json:
            assert running.stdout is not None
            await asyncio.wait_for(running.stdout.readexactly(2), BOUND_S)
        running.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(running.communicate(), BOUND_S)
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)
    assert running.returncode == 130, (out, err)
    assert err.decode().splitlines() == ["sluice: CANCELLED: interrupted"], err.decode()
    if as_json:
        assert json.loads(out)["error"]["reason"] == "CANCELLED"


def test_ctrl_c_in_a_finalizer_is_not_lost() -> None:
    program = """
import signal, sys, time
from cli import main
def wait(words):
    class Last:
        def __del__(self): signal.raise_signal(signal.SIGINT); time.sleep(0)
    Last()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return 130
    return 1
main.run = wait
main.main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=BOUND_S, check=False
    )
    assert (ran.returncode, ran.stderr) == (130, b"")


async def test_closed_pipe_ends_it_without_a_traceback() -> None:
    hold = Hold()
    script = [started(), delta(0, "ab"), hold, delta(2, "c"), finished()]
    async with (
        ScriptedService.serve([script]) as service,
        process(service.address, "generate", "p") as running,
    ):
        assert running.stdout is not None
        await asyncio.wait_for(running.stdout.readexactly(2), BOUND_S)
        running.stdout._transport.close()  # type: ignore[attr-defined]
        hold.release.set()
        assert running.stderr is not None
        err = await asyncio.wait_for(running.stderr.read(), BOUND_S)
        code = await asyncio.wait_for(running.wait(), BOUND_S)
    assert (code, err) == (1, b"")
