"""The command as a process: what it loads, how it streams, how signals and closed pipes end it."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from tests.sluice.cli.commands import BOUND_S, process
from tests.support.scripted import Hold, ScriptedService, delta, finished, started

HEAVY = ("torch", "transformers", "numpy", "pydantic", "yaml", "nats", "tritonclient", "rich")


@pytest.mark.parametrize("module", ["generate", "chat", "models", "evaluate", "demo", "main"])
def test_commands_load_nothing_heavy(module: str) -> None:
    code = f"import sys, sluice.cli.{module}; print([m for m in {HEAVY} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert loaded.stdout.decode().strip() == "[]"


def test_running_a_command_loads_nothing_heavy() -> None:
    code = (
        "import sys; from sluice.cli.main import run; run(['models', '--address', '127.0.0.1:1']);"
        f"print([m for m in {HEAVY[:2]} if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert loaded.stdout.decode().strip() == "[]"


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
    assert running.returncode == 130
    assert err == b"sluice: CANCELLED: interrupted\n"
    if as_json:
        assert json.loads(out)["error"]["reason"] == "CANCELLED"


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


async def test_bytes_on_stdin_that_are_not_utf8() -> None:
    async with process("127.0.0.1:1", "generate", "-") as running:
        out, err = await asyncio.wait_for(running.communicate(b"\xff"), BOUND_S)
    assert (running.returncode, out) == (1, b"")
    assert err == b"sluice: REQUEST_INVALID: prompt: is not valid UTF-8: byte 0xff at offset 0\n"
