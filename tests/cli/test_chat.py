"""`sluice chat`: turns from a pipe, and from a terminal."""

import asyncio
import json
import os
import pty
import sys
from collections.abc import Sequence

import pytest

from sluice import errors
from sluice.v1.inference_pb2 import Role
from tests.cli.commands import BOUND_S, COMMAND, Cli
from tests.support.scripted import Fail, Hold, ScriptedService, Step, delta, finished, started

WHOLE: Sequence[Step] = [started(), delta(0, "ab"), delta(2, "c"), finished()]


def turns(service: ScriptedService, call: int) -> list[tuple[str, str]]:
    return [
        (Role.Name(m.role).removeprefix("ROLE_").lower(), m.content)
        for m in service.requests[call].chat.messages
    ]


async def test_each_line_is_a_turn(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli("chat", "--address", service.address, stdin=b"one\n\ntwo\n")
    assert (ran.code, ran.out, ran.err) == (0, "abc\nabc\n", "")
    assert turns(service, 0) == [("user", "one")]
    assert turns(service, 1) == [("user", "one"), ("assistant", "abc"), ("user", "two")]


async def test_system_message_and_options(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        arguments = ["--system", "be brief", "--max-tokens", "5", "-m", "large"]
        await cli("chat", *arguments, "--address", service.address, stdin=b"one")
    assert turns(service, 0) == [("system", "be brief"), ("user", "one")]
    assert service.requests[0].sampling.max_tokens == 5
    assert service.requests[0].model == "large"


async def test_json_is_one_object_a_turn(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli("chat", "--json", "--address", service.address, stdin=b"one\ntwo\n")
    assert [json.loads(line)["text"] for line in ran.out.splitlines()] == ["abc", "abc"]


async def test_error_ends_a_piped_conversation(cli: Cli) -> None:
    no = Fail(errors.UnknownModel("no such model"))
    async with ScriptedService.serve([WHOLE, [no]]) as service:
        ran = await cli("chat", "--address", service.address, stdin=b"one\ntwo\nthree\n")
    assert (ran.code, ran.out) == (1, "abc\n")
    assert ran.err == "sluice: MODEL_UNKNOWN: no such model\n"
    assert len(service.requests) == 2


async def test_line_that_is_not_utf8(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        ran = await cli("chat", "--address", service.address, stdin=b"one\ncaf\xe9\n")
    assert ran.code == 1
    assert "line 2 is not valid UTF-8" in ran.err


ON_TERMINAL = (
    "import fcntl, os, sys, termios;"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Makes the pseudo-terminal the controlling one, so that Ctrl-C is a signal. Not between fork and exec of this process:
gRPC's handlers of a fork hang or break there now and then."""


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, main: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._main = main
        self._seen = b""
        self._more = asyncio.Event()
        self._closed = False
        asyncio.get_running_loop().add_reader(main, self._read)

    @classmethod
    async def of(cls, address: str, *arguments: str) -> "Terminal":
        main, side = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ON_TERMINAL),
            *COMMAND,
            *arguments,
            stdin=side,
            stdout=side,
            stderr=side,
            env={**os.environ, "SLUICE_ADDRESS": address, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(side)
        return cls(main, process)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    async def expect(self, text: str) -> None:
        """Waits for `text`, and forgets what came up to its end."""
        try:
            async with asyncio.timeout(BOUND_S):
                while text.encode() not in self._seen:
                    assert not self._closed, (text, self._seen, self.process.returncode)
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError((text, self._seen)) from None
        self._seen = self._seen.partition(text.encode())[2]

    async def end(self) -> int:
        try:
            return await asyncio.wait_for(self.process.wait(), BOUND_S)
        finally:
            if self.process.returncode is None:
                self.process.kill()
            asyncio.get_running_loop().remove_reader(self._main)
            os.close(self._main)

    def _read(self) -> None:
        try:
            self._seen += os.read(self._main, 65536)
        except OSError:  # the other end is closed
            self._closed = True
            asyncio.get_running_loop().remove_reader(self._main)
        self._more.set()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux pseudo-terminal")
async def test_conversation_on_a_terminal() -> None:
    hold = Hold()
    no = Fail(errors.Overloaded("full"))
    scripts: list[Sequence[Step]] = [[started(), delta(0, "half"), hold], [no], WHOLE]
    async with ScriptedService.serve(scripts) as service:
        terminal = await Terminal.of(service.address, "chat")
        await terminal.expect("> ")
        terminal.type("one\n")
        await terminal.expect("half")
        terminal.type("\x03")
        await asyncio.wait_for(hold.cancelled.wait(), BOUND_S)
        await terminal.expect("> ")
        terminal.type("two\n")
        await terminal.expect("sluice: OVERLOADED: full")
        await terminal.expect("> ")
        terminal.type("three\n")
        await terminal.expect("abc")
        await terminal.expect("trace 0af7651916cd43dd8448eb211c80319c")
        await terminal.expect("> ")
        terminal.type("\x04")
        assert await terminal.end() == 0
    assert turns(service, 1) == [("user", "one"), ("assistant", "half"), ("user", "two")]
    assert turns(service, 2) == [("user", "one"), ("assistant", "half"), ("user", "three")]
