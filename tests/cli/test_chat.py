"""`sluice chat`: turns from a pipe, and from a terminal."""

import asyncio
import io
import json
import sys
from collections.abc import Sequence

import pytest

from cli.main import run
from sluice import errors
from sluice.v1.inference_pb2 import Role
from tests.cli.commands import BOUND_S, Cli
from tests.cli.terminal import Terminal
from tests.support.scripted import Fail, Hold, ScriptedService, Step, delta, finished, started

WHOLE: Sequence[Step] = [started(), delta(0, "ab"), delta(2, "c"), finished()]


def turns(service: ScriptedService, call: int) -> list[tuple[str, str]]:
    return [
        (Role.Name(m.role).removeprefix("ROLE_").lower(), m.content)
        for m in service.requests[call].chat.messages
    ]


async def test_each_piped_line_is_a_turn(cli: Cli) -> None:
    no = Fail(errors.UnknownModel("no such model"))
    async with ScriptedService.serve([WHOLE, WHOLE, [no]]) as service:
        arguments = ["--system", "be brief", "--max-tokens", "5", "--address", service.address]
        ran = await cli("chat", *arguments, stdin=b"/help\n\ntwo\nthree\nfour\n")
    assert (ran.code, ran.out) == (1, "abc\nabc\n")
    assert ran.err == "sluice: MODEL_UNKNOWN: no such model\n"
    assert turns(service, 1) == [
        *(("system", "be brief"), ("user", "/help"), ("assistant", "abc"), ("user", "two"))
    ]
    assert [one.sampling.max_tokens for one in service.requests] == [5, 5, 5]


async def test_json_is_one_object_a_turn(cli: Cli) -> None:
    async with ScriptedService.serve([WHOLE]) as service:
        words = ("chat", "--json", "--address", service.address)
        ran = await cli(*words, stdin=b"one\ncaf\xe9\n")
    answer, error = map(json.loads, ran.out.splitlines())
    assert answer["text"] == "abc"
    assert "line 2 is not valid UTF-8" in error["error"]["message"]


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux pseudo-terminal")
async def test_commands_on_a_terminal() -> None:
    async with ScriptedService.serve([WHOLE, WHOLE]) as service:
        terminal = await Terminal.of(service.address, "chat", "--system", "be brief")
        await terminal.expect(f"model auto at {service.address}; /help lists commands, /exit or")
        for typed, says in (
            ("/help", "/model NAME    ask this model from now on"),
            ("/model", "model auto; there are auto, small, large"),
            ("/model huge", "no model 'huge'; there are auto, small, large"),
            ("/nothing", "no command /nothing; /help lists them"),
            ("one", "abc"),
            ("/model large", "model large"),
            ("/clear", "the turns so far are forgotten"),
            ("//two", "abc"),
        ):
            await terminal.expect("> ")
            terminal.type(f"{typed}\n")
            await terminal.expect(says)
        await terminal.expect("> ")
        terminal.type("exit\n")
        assert await terminal.end() == 0
    assert [request.model for request in service.requests] == ["auto", "large"]
    assert turns(service, 0) == [("system", "be brief"), ("user", "one")]
    assert turns(service, 1) == [("system", "be brief"), ("user", "/two")]


class TerminalInput(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_ctrl_c_twice_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt])

    def answer(_: str) -> str:
        if (text := next(typed)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(text)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", TerminalInput())
    async with ScriptedService.serve([WHOLE]) as service:
        assert await asyncio.to_thread(run, ["chat", "--address", service.address]) == 130
    assert turns(service, 0) == [("user", "one")]
